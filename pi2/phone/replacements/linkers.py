"""Linkers of a bundle: none, since its libraries are linked."""

from __future__ import annotations


def find_obstacles() -> list[str]:
    return []
