"""Linkers of a bundle: none, since its libraries are linked."""

from __future__ import annotations


def find_obstacles() -> list[str]:
    """Return nothing: there is nothing to link."""
    return []
