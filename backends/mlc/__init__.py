"""Drives an installed MLC-LLM, for dense models on GPUs."""
