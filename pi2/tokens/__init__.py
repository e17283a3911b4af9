"""Texts of tokens: compact tables of them, and how pairs are merged."""
