"""A model as a list of blocks, a block as a list of operators; sees nothing of plans."""
