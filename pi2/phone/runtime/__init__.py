"""Modules of a bundle next to pi2's own engine: command line, probe, reader of tokenizers."""
