"""Neurons that the tokens of a step have named, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, I64

if TYPE_CHECKING:
    from pi2.backends.host.contract import HostLoops


def unite_named(lists: Sequence[I32], neurons: int, loops: HostLoops | None) -> tuple[I32, I64]:
    """Return the neurons, ascending, that any of at most 64 ``lists`` has, and for each of all
    ``neurons`` a number whose bit k says whether list k has it."""
    named = np.empty(neurons, np.int64)
    if loops is not None:
        return loops.unite_named(lists, named), named
    named[:] = 0
    for number, own in enumerate(lists):
        named[own] |= np.left_shift(np.int64(1), number)
    return np.flatnonzero(named).astype(np.int32), named
