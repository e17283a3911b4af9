"""Kernels for GPUs as TensorIR: one source for OpenCL, WebGPU and CUDA.

``signature`` and ``specification`` are plain Python.  The other modules load TVM's compiler, which
only the child process of ``compile`` does."""
