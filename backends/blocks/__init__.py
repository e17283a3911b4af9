"""Ordinary models whose weights stay in the formats of `pi2.formats` (`model.BlockModel`). A step
is one call: `steps.ll` runs a table of instructions on all threads, each a kernel with its
arguments (`contract`). A library has the kernels of a format (`rows`), or the shared ones
(`program`)."""
