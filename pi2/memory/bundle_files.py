"""Files of neurons, opened for direct reads past the page cache, or buffered if refused."""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, U8, U32, Bits
from pi2.caches import open_regular
from pi2.diagnostics import UserError
from pi2.reads import describe_failure, read_at

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
    """Observes reads, doing nothing itself; times are of `time.perf_counter`. ``note_part`` and
    ``note_run`` come from reading threads."""

    def note_start(self, pending: PendingRead, start_s: float) -> None:
        """Reads of neurons were begun, from ``start_s`` on."""

    def note_part(self, batch: ReadBatch, part: int, start_s: float, end_s: float) -> None:
        """A thread has read a part of a batch.  Engines without threads cannot tell."""

    def note_wait(self, pending: PendingRead, number: int, start_s: float, end_s: float) -> None:
        """The caller has waited for cluster ``number``, and has it."""

    def note_run(self, run: WatchedRun, start_s: float, end_s: float) -> None:
        """A run of neurons has been read since it was begun; `note_run_wait` comes later."""

    def note_run_wait(self, run: WatchedRun, start_s: float, end_s: float) -> None:
        """The caller has waited for a run, and has it."""


class WatchedRun(Future[None]):
    """A long read whose observer is told of its end, and of waiting for it."""

    def __init__(
        self, read: Future[None], layer: int, neurons: int, observer: ReadObserver
    ) -> None:
        super().__init__()
        self.layer = layer
        self.neurons = neurons
        self._read = read
        self._observer = observer
        self._start_s = time.perf_counter()
        read.add_done_callback(self._take)

    def cancel(self) -> bool:
        return self._read.cancel()

    def _take(self, read: Future[None]) -> None:
        if read.cancelled():
            super().cancel()
            return
        self._observer.note_run(self, self._start_s, time.perf_counter())
        error = read.exception()
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> None:
        start_s = time.perf_counter()
        super().result(timeout)
        self._observer.note_run_wait(self, start_s, time.perf_counter())


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


class BundleFiles:
    def __init__(
        self, files: Sequence[BundleFile], *, direct: bool, gate_bytes: int, room: U8
    ) -> None:
        """``room``: a slot for trial reads. `UserError` P506 for another size, P620 on failure."""
        self.files = files
        self.descriptors: list[int] = []
        self.fallback: str | None = None
        """Why direct reads were given up, if they were."""
        self.gate_bytes = gate_bytes
        """Bytes of a bundle that are read before the others; 0 where bundles are read whole."""
        self.phases_fallback: str | None = None
        """Why gates are not read first, if they should be."""
        try:
            self._open(direct, room)
        except BaseException:
            self.close()
            raise

    def _open(self, direct: bool, room: U8) -> None:
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        if direct and flag == 0:
            self.fallback = "this system has no O_DIRECT"
        for file in self.files:
            try:
                fd = open_regular(file.path, flag)
            except OSError as error:
                if not flag or error.errno != errno.EINVAL:
                    raise _refuse(file.path, 0, error) from None
                fd = -1
            if fd >= 0 and flag and not self._accepts(fd, file, room, 1, file.stride):
                os.close(fd)
                fd = -1
            if fd < 0:
                flag = 0
                self.fallback = "the file system refuses O_DIRECT for reads of one bundle"
                fd = open_regular(file.path)
            self.descriptors.append(fd)
            size = os.fstat(fd).st_size
            parts = self.gate_bytes, file.stride
            if self.gate_bytes and direct and flag and not self._accepts(fd, file, room, 0, *parts):
                self.gate_bytes = 0
                self.phases_fallback = "the file system refuses O_DIRECT for reads of one gate"
            if file.bytes is not None and size != file.bytes:
                raise UserError.of(
                    "P506",
                    f"{file.path} has {size} bytes instead of {file.bytes}: it was cut or replaced",
                    help="make the store again, or copy it again as a whole",
                )

    @staticmethod
    def _accepts(fd: int, file: BundleFile, room: U8, number: int, *cuts: int) -> bool:
        """Whether parts of bundle ``number``, which end at ``cuts``, are read directly."""
        if len(room) == 0 or file.count <= number:
            return True
        first = file.bundles_offset + number * file.stride
        try:
            for begin, end in pairwise((0, *cuts)):
                os.preadv(fd, [room[begin:end].data], first + begin)
        except OSError:
            return False
        return True

    def read(self, layer: int, target: U8, offset: int) -> None:
        """Fill ``target`` from byte ``offset`` of the file of ``layer``; UserError P620 on failure
        or end of file."""
        path = self.files[layer].path
        try:
            done = read_at(self.descriptors[layer], target.data, offset, target.size)
        except OSError as error:
            raise _refuse(path, offset, error) from None
        if done < target.size:
            raise UserError.of(
                "P620",
                f"the neuron store ends too early: no byte {offset + done} in {path}",
                help="the file was cut or replaced; check it with `pi2 store verify`",
            )

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def _refuse(path: Path, offset: int, error: OSError) -> UserError:
    return UserError.of(
        "P620",
        describe_failure(path, offset, error),
        help="check the disk and the file with `pi2 store verify`",
    )
