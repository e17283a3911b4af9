"""TensorIR kernels: written with TVMScript's builder, compiled ahead of time, loaded without TVM.

The importer needs no compiler: `spec`, `isa`, `cache` and `runtime` are plain Python; everything
else here is imported only by the compiling process (``python -m pi2.backends.kernels.compile``).
"""
