"""Faults of mapped files, which end a process that does not handle them."""
