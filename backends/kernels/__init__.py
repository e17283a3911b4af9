"""TensorIR kernels that compute a model, written with TVMScript's builder.

A process that runs a model needs no compiler: `spec` and `isa` are plain Python; everything else
here is imported only by the compiling process (`pi2.backends.compiler`).
"""
