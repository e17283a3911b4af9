"""Runs the bundle that contains this package: ``python -m pi2_phone [DIR] --prompt TEXT``."""
