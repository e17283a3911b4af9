"""Reads ``tokenizer.json`` in plain Python; anything it does not know raises `Unsupported`."""
