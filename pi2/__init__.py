"""pi2 runs large language models that do not fit into memory, from plan files."""
