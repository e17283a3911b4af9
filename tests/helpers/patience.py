"""How long tests wait for what must come."""

PATIENCE_S = 600.0
"""Seconds: nothing depends on them, but a test that would wait for ever fails in the end."""
