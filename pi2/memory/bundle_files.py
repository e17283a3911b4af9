"""Files of neurons, their checks, and who is told of reads."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, U8, U32, Bits
from pi2.diagnostics import UserError
from pi2.reads import describe_failure

if TYPE_CHECKING:
    from pi2.memory.flash import PendingRead
    from pi2.memory.host_loops import HostLoops
    from pi2.memory.io_engine import ReadBatch


class NeuronChecks:
    """State of the neurons of every layer: their checks, and which have been compared."""

    def __init__(self, checks: Sequence[U32], loops: HostLoops) -> None:
        """``checks``: CRC-32 [neurons] of the bundles of each layer; ``loops`` compute them where
        the processor has an instruction for it."""
        self._checks = checks
        self._compared = [np.zeros(len(layer), bool) for layer in checks]
        self._loops = loops

    def find_unknown(self, layer: int, indices: I32) -> Bits:
        """Which of ``indices`` [n] have not been compared."""
        return ~self._compared[layer][indices]

    def find_damaged(self, layer: int, indices: I32, arena: U8, slots: I32) -> list[int]:
        """Compare the checks of bundles ``indices`` [n], which are in ``slots`` [n] of ``arena``,
        unless they have been compared: return the places in ``indices`` of damaged ones."""
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
        compiled = self._loops.compute_checks(arena, slots)
        if compiled is not None:
            return compiled
        return np.array([zlib.crc32(arena[slot]) for slot in slots.tolist()], np.uint32)


class ReadObserver:
    """Observes reads, doing nothing itself; times are of `time.perf_counter`. ``note_part`` comes
    from reading threads."""

    def note_start(self, pending: PendingRead, start_s: float) -> None:
        """Reads of neurons were begun, from ``start_s`` on."""

    def note_part(self, batch: ReadBatch, part: int, start_s: float, end_s: float) -> None:
        """A thread has read a part of a batch.  Engines without threads cannot tell."""

    def note_wait(self, pending: PendingRead, number: int, start_s: float, end_s: float) -> None:
        """The caller has waited for cluster ``number``, and has it."""

    def note_reads(self, batch: ReadBatch, size: int, start_s: float, end_s: float) -> None:
        """The caller has waited for ``size`` bytes of a file that is computed as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """A layer's neurons on flash."""

    path: Path
    bundles_offset: int
    stride: int
    count: int
    bytes: int | None = None
    """Size that the store states."""
    read_checks: Callable[[], U32] | None = None
    """Gives the CRC-32 of every bundle, [count]."""


def accepts_parts(descriptor: int, file: BundleFile, room: U8, number: int, *cuts: int) -> bool:
    """Whether parts of bundle ``number``, which end at ``cuts``, are read as ``descriptor`` was
    opened; ``room`` has as many bytes as a bundle, or none to try with."""
    if len(room) == 0 or file.count <= number:
        return True
    first = file.bundles_offset + number * file.stride
    try:
        for begin, end in pairwise((0, *cuts)):
            os.preadv(descriptor, [room[begin:end].data], first + begin)
    except OSError:
        return False
    return True


def refuse_bundles(path: Path, offset: int, error: OSError | None) -> UserError:
    """The error for neurons that cannot be read, or that a file ends before."""
    if error is None:
        return UserError.of(
            "P620",
            f"the neuron store ends too early: no byte {offset} in {path}",
            help="the file was cut or replaced; check it with `pi2 store verify`",
        )
    return UserError.of(
        "P620",
        describe_failure(path, offset, error),
        help="check the disk and the file with `pi2 store verify`",
    )
