"""Runs the bundle that this package lies in: ``python -m pi2_phone [DIR] --prompt TEXT``."""
