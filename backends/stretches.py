"""Stretches of neurons: so many neighbours each, numbered as if they were one."""

from __future__ import annotations

import numpy as np

from pi2.arrays import I32


def expand_stretches(numbers: I32, stretch: int) -> I32:
    """Numbers of the neurons [n stretch] of stretches ``numbers`` [n], each one's in order."""
    if stretch == 1:
        return numbers
    first: I32 = np.multiply(numbers, stretch, dtype=np.int32)[:, None]
    return np.add(first, np.arange(stretch, dtype=np.int32)).reshape(-1)
