"""The reference backend that kernels are tested against: float32 numpy, weights dequantised on use,
nothing fused; KV is 8-bit only if the plan states it."""
