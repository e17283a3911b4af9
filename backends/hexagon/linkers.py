"""Linkers that know Hexagon."""

import shutil

LINKERS = ("ld.lld", *(f"ld.lld-{version}" for version in range(22, 13, -1)))
"""Programs, best first."""


def find_obstacles() -> list[str]:
    """Return what keeps libraries from being linked here, and what to install."""
    if find_linker() is not None:
        return []
    return [f"there is no {LINKERS[0]}, which links its programs: apt install lld"]


def find_linker() -> str | None:
    """Return the first of `LINKERS` that is installed."""
    return next(filter(None, map(shutil.which, LINKERS)), None)
