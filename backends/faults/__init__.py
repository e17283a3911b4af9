"""Faults of mapped files, which end a process where nobody handles them."""
