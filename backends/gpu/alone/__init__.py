"""Whole models on a GPU."""
