"""GPUs: kernels, and the launchers that run them."""
