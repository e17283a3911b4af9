"""Linkers that know Hexagon."""

from __future__ import annotations

import shutil

LINKERS = ("ld.lld", *(f"ld.lld-{version}" for version in range(22, 13, -1)))
"""Programs, best first."""


def find_linker() -> str | None:
    """Return the first of `LINKERS` that is installed."""
    return next(filter(None, map(shutil.which, LINKERS)), None)
