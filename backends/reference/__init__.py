"""The reference backend: numpy in float32, straight from the store's bytes.

It is the truth that every kernel is tested against, so it is written to be read: weights are
dequantised where they are used, activations are never quantised, and nothing is fused.  Keys and
values are 8-bit integers only where the plan says so.
"""
