"""What tools/bench_gpu.py measures."""
