"""The cpu backend: TensorIR kernels, compiled for this machine's instruction set.

Activations are quantised to 16 bits per group of 32, as two int8 planes (`kernels.quantize`), or to
one plane, or not at all; docs/reference/exactness.md says what each promises."""
