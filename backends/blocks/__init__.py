"""Ordinary models whose weights stay in the formats of `pi2.formats`: `model.BlockModel`.

A step is one call of compiled code: `steps.ll` runs a table of instructions, each a kernel and a
table of its arguments (`contract`), on all threads.  Kernels belong to formats and processors:
sizes are arguments.  A library holds the kernels of one format (`rows`, from the descriptions in
`unpacking`), or those that all formats share (`program` lists them).
"""
