"""TensorIR kernels that compute a model, written with TVMScript's builder."""
