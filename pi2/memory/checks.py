"""The checks of neurons: each is compared with its CRC-32 when it is read for the first time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, U8, U32, Bits

if TYPE_CHECKING:
    from pi2.backends.host.contract import HostLoops


class NeuronChecks:
    """What is known of the neurons of every layer: their checks, and which have been compared."""

    def __init__(self, checks: Sequence[U32], loops: HostLoops | None) -> None:
        """``checks``: CRC-32 [neurons] of the bundles of each layer; ``loops`` compute them in
        compiled code, where a backend has it."""
        self._checks = checks
        self._compared = [np.zeros(len(layer), bool) for layer in checks]
        self._loops = loops

    def find_unknown(self, layer: int, indices: I32) -> Bits:
        """Which of ``indices`` [n] have not been compared."""
        return ~self._compared[layer][indices]

    def are_known(self, layer: int, indices: I32, granule: int) -> bool:
        """Whether all neurons of the granules ``indices`` [n] have been compared."""
        known = self._compared[layer].reshape(-1, granule).take(indices, axis=0)
        # As `known.all()`, in a third of its time.
        return int(np.count_nonzero(known)) == known.size

    def find_damaged(self, layer: int, indices: I32, arena: U8, slots: I32) -> list[int]:
        """Compare bundles ``indices`` [n], which are in ``slots`` [n] of ``arena``, unless they
        have been: return places in ``indices`` of those that are damaged."""
        known = self._compared[layer].take(indices)
        places = np.flatnonzero(~known)
        if len(places) == 0:
            return []
        wanted = indices[places]
        found = self._compute(arena, slots[places])
        good = found == self._checks[layer][wanted]
        self._compared[layer][wanted[good]] = True
        return [int(place) for place in places[~good]]

    def _compute(self, arena: U8, slots: I32) -> U32:
        compiled = None if self._loops is None else self._loops.compute_checks(arena, slots)
        if compiled is not None:
            return compiled
        return np.array([zlib.crc32(arena[slot]) for slot in slots.tolist()], np.uint32)
