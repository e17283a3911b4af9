"""Tables that kernels look codes up in."""

from __future__ import annotations

import numpy as np

from pi2.arrays import U8


def make_tables(name: str) -> U8:
    """Return the tables of a format; empty where it has none."""
    return np.zeros(64, np.uint8)
