"""Hexagon NPUs: HVX kernels, and a dense unit that a worker process computes with them."""
