"""Definitions of the kernels of `pi2.backends.blocks.contract.FIELDS`: each is a function of that
name, in float64."""
