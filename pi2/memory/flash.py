"""Reads of neurons from flash: scattered bundles into slots, long runs into buffers."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import I32, U8, Bits
from pi2.diagnostics import UserError
from pi2.memory.bundle_files import (
    BundleFile,
    NeuronChecks,
    ReadObserver,
    accepts_parts,
    refuse_bundles,
)
from pi2.memory.direct_files import BatchReads, DirectFiles
from pi2.memory.host_loops import HostLoops
from pi2.memory.io_engine import (
    BundlePlaces,
    EngineName,
    IoEngine,
    NullEngine,
    PreadEngine,
    ReadBatch,
    divide_clusters,
    divide_requests,
    find_addresses,
    keep_gates,
    make_batch,
    make_reads,
)
from pi2.memory.uring import UringEngine
from pi2.reads import is_direct

_PAGE = 4096
RUN_BYTES = 1 << 20
"""Of neurons next to each other, so much is a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How a plan wants neurons to be read."""

    engine: EngineName = "pread"
    direct: bool = True
    threads: int = 4
    depth: int = 64
    """Most requests in flight, if the engine has a queue."""
    merge_gap: int = 0
    """Most bundles between two wanted ones that are read with them."""
    cluster: int = 64
    """Neurons that are read together before they are computed, at least."""
    ahead: bool = False
    """Reads begin a layer ahead: the drive reads the next layer's neurons while these are computed.
    It is asked for all at once if the engine does not divide them among threads and no gates are
    read first."""
    verify: bool = False
    """Check every bundle when it is read for the first time."""
    gate_bytes: int = 0
    """First bytes of a bundle, with its gate, that are read before the others; 0: whole bundles."""


@dataclass(slots=True, eq=False)
class PendingRead:
    """Reads that are on their way, in clusters: neurons that are read together are computed
    together.  Not frozen: one is made per layer and token."""

    layer: int
    indices: I32
    """Stored indices [n], ascending."""
    slots: I32
    """Their slots, [n]."""
    clusters: tuple[slice, ...]
    """Runs of ``indices``, in their order."""
    batch: ReadBatch | None
    gates: Bits | None = None
    """Whether only the gate of each neuron is read, [n]; None where neurons are read whole."""
    number: int = 0
    """Number of the first cluster."""
    room: U8 | None = None
    """[., stride], in which the slots are; by default the arena."""


class FlashReader:
    """Reads bundles as a plan says; one caller at a time."""

    def __init__(
        self,
        files: Sequence[BundleFile],
        arena: U8,
        settings: ReadSettings,
        loops: HostLoops,
        engine: IoEngine | None = None,
    ) -> None:
        """``arena`` [slots, stride]; ``loops`` prepare and issue reads in compiled code; with an
        ``engine`` of its own no file is opened.

        `UserError` P506 for a file of another size, P620 on failure."""
        self._files, self._arena = files, arena
        self._address: int = arena.ctypes.data
        self._loops = loops
        self._settings = settings
        self._observer: ReadObserver | None = None
        self.gate_reads = 0
        """Neurons whose gate was read by itself."""
        self.saved_bytes = 0
        """Bytes of up and down that were not read, because the gate was closed."""
        self._checks: NeuronChecks | None = None
        self._gate_bytes = settings.gate_bytes
        self.phases_fallback: str | None = None
        """Why gates are not read first, if the plan wants it."""
        paths = [file.path for file in files] if engine is None else []
        self._opened = DirectFiles(paths, direct=settings.direct, refuse=refuse_bundles)
        try:
            if engine is None:
                self._try_files()
                engine = self._opened.open_engine(settings, loops)
        except BaseException:
            self._opened.close()
            raise
        self._engine = engine
        self.reads = BatchReads(self._opened, engine)
        self.engine, self.engine_fallback = self._opened.engine, self._opened.engine_fallback
        if settings.verify:
            checks = [file.read_checks() for file in files if file.read_checks is not None]
            assert len(checks) == len(files), "files without checks cannot be verified"
            self._checks = NeuronChecks(checks, loops)
        self._places = self._list_places(settings.merge_gap)

    def _try_files(self) -> None:
        """Compare sizes; give up direct reads, or gates of their own, if they are refused."""
        # A slot's content is overwritten before anybody uses it.
        room = self._arena[-1] if len(self._arena) else np.empty(0, np.uint8)
        for number, (file, fd) in enumerate(
            zip(self._files, self._opened.descriptors, strict=True)
        ):
            size = os.fstat(fd).st_size
            if file.bytes is not None and size != file.bytes:
                raise UserError.of(
                    "P506",
                    f"{file.path} has {size} bytes instead of {file.bytes}: it was cut or replaced",
                    help="make the store again, or copy it again as a whole",
                )
            gates = self._gate_bytes
            if not is_direct(fd):
                continue
            if not accepts_parts(fd, file, room, 1, file.stride):
                reason = "the file system refuses O_DIRECT for reads of one bundle"
                self._opened.leave_direct(number, reason)
            elif gates and not accepts_parts(fd, file, room, 0, gates, file.stride):
                self._gate_bytes = 0
                self.phases_fallback = "the file system refuses O_DIRECT for reads of one gate"

    @property
    def fallback(self) -> str | None:
        """Why direct reads were given up, if they were."""
        return self._opened.fallback

    @property
    def read_bytes(self) -> int:
        return self.reads.read_bytes

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for neurons."""
        return self.reads.waited_s

    def _list_places(self, gap: int) -> list[BundlePlaces]:
        """Places of the bundles of each layer."""
        size = self._arena.shape[1]
        room = np.zeros(size + _PAGE if gap else 0, np.uint8)
        self._scratch = room[-room.ctypes.data % _PAGE :]
        address, scratch = self._arena.ctypes.data, self._scratch.ctypes.data
        return [
            BundlePlaces(file.bundles_offset, file.stride, address, gap, scratch)
            for file in self._files
        ]

    def start(self, layer: int, indices: I32, slots: I32) -> PendingRead:
        """Begin to read bundles ``indices`` [n] (ascending) of ``layer`` into ``slots`` [n], or
        their gates; unchecked bundles are read whole."""
        start_s = 0.0 if self._observer is None else time.perf_counter()
        engine, places = self._engine, self._places[layer]
        if isinstance(engine, UringEngine) and len(indices) and not self._gate_bytes:
            batch = engine.submit_bundles(layer, indices, slots, places)
            clusters = self._divide(len(indices))
            clusters, batch.parts = divide_requests(clusters, batch.requests)
            return self._note_start(PendingRead(layer, indices, slots, clusters, batch), start_s)
        batch = make_batch(layer, indices, slots, self._loops, places)
        clusters = self._divide(len(indices))
        gates = None
        if len(indices):
            if self._gate_bytes:
                unknown = np.zeros(len(indices), bool)
                if self._checks is not None:
                    unknown = self._checks.find_unknown(layer, indices)
                batch, gates = keep_gates(batch, self._gate_bytes, unknown)
                self.gate_reads += int(np.count_nonzero(gates))
            clusters, batch.parts = divide_requests(clusters, batch.requests)
            self.reads.submit(batch)
        return self._note_start(PendingRead(layer, indices, slots, clusters, batch, gates), start_s)

    def _divide(self, count: int) -> tuple[slice, ...]:
        settings = self._settings
        # What follows a cluster's gates is read while the next one's are computed.
        may_be_one = settings.ahead and not self._gate_bytes
        is_one = may_be_one and isinstance(self._engine, UringEngine)
        most = 1 if is_one else 2 * settings.threads
        return divide_clusters(count, settings.cluster, most)

    def _note_start(self, pending: PendingRead, start_s: float) -> PendingRead:
        if self._observer is not None:
            self._observer.note_start(pending, start_s)
        return pending

    def start_rest(self, pending: PendingRead, number: int, opened: Bits) -> PendingRead | None:
        """Begin to read up and down of those in cluster ``number`` whose gates, ``opened`` [n], are
        open; None if there is nothing left to read."""
        assert pending.gates is not None
        start_s = 0.0 if self._observer is None else time.perf_counter()
        cluster, file = pending.clusters[number], self._files[pending.layer]
        gates = pending.gates[cluster]
        self.saved_bytes += int(np.count_nonzero(gates & ~opened)) * self.rest_bytes
        wanted = gates & opened
        indices, slots = pending.indices[cluster][wanted], pending.slots[cluster][wanted]
        if len(indices) == 0:
            return None
        skip, size = self._gate_bytes, np.full(len(indices), self.rest_bytes, np.int64)
        offsets = find_addresses(indices, file.bundles_offset + skip, file.stride)
        addresses = find_addresses(slots, self._address + skip, file.stride)
        batch = make_reads(pending.layer, offsets, addresses, size)
        batch.content = "rest"
        self.reads.submit(batch)
        whole = (slice(0, len(indices)),)
        rest = PendingRead(pending.layer, indices, slots, whole, batch, number=number)
        if self._observer is not None:
            self._observer.note_start(rest, start_s)
        return rest

    @property
    def rest_bytes(self) -> int:
        """Bytes of a bundle after its first part."""
        stride: int = self._arena.shape[1]
        return stride - self._gate_bytes

    def advance(self) -> None:
        """Keep the drive busy with begun reads; called between computations, never waits."""
        self._engine.advance()

    def finish(self, pending: PendingRead, number: int) -> I32:
        """Wait for a cluster and return its slots; failed or wrong reads are tried again, then
        UserError P620 or P511."""
        cluster = pending.clusters[number]
        slots = pending.slots[cluster]
        if len(slots) == 0:
            return slots
        start_s = 0.0 if self._observer is None else time.perf_counter()
        assert pending.batch is not None
        self.reads.finish(pending.batch, number)
        if self._checks is not None:
            room = self._arena if pending.room is None else pending.room
            self._verify(self._checks, pending.layer, pending.indices[cluster], room, slots)
        if self._observer is not None:
            self._observer.note_wait(pending, number, start_s, time.perf_counter())
        return slots

    def abandon(self, pending: PendingRead) -> None:
        """Wait until nothing of it is under way: a late read would spoil a slot's next owner."""
        if pending.batch is not None and len(pending.indices):
            self._engine.abandon(pending.batch)

    def _verify(
        self, checks: NeuronChecks, layer: int, indices: I32, bundles: U8, slots: I32
    ) -> None:
        damaged = checks.find_damaged(layer, indices, bundles, slots)
        if not damaged:
            return
        for place in damaged:
            self._read(layer, int(indices[place]), bundles[slots[place]])
        left = checks.find_damaged(layer, indices, bundles, slots)
        if left:
            raise _describe_damage(self._files[layer].path, int(indices[left[0]]))

    def _read(self, layer: int, first: int, target: U8) -> None:
        """Read bundles from ``first`` on, now."""
        file = self._files[layer]
        offset = file.bundles_offset + first * file.stride
        if self._opened.descriptors:
            self._opened.read(layer, target.reshape(-1).data, offset, target.nbytes)

    def plan_run(self, layer: int, first: int, room: U8, parts: Sequence[slice]) -> PendingRead:
        """Plan long reads of ``parts`` of bundles ``first``, ``first + 1``, ... of ``layer``, each
        into its place in ``room`` [n, stride], which begins at a block: one cluster."""
        file, step = self._files[layer], max(1, RUN_BYTES // room.shape[1])
        places, counts = [], []
        for part in parts:
            for place in range(part.start, part.stop, step):
                places.append(place)
                counts.append(min(step, part.stop - place))
        begins = np.array(places, np.int64) * file.stride
        offsets = begins + (file.bundles_offset + first * file.stride)
        addresses, sizes = begins + room.ctypes.data, np.array(counts, np.int64) * file.stride
        batch = make_reads(layer, offsets, addresses, sizes)
        batch.content = "run"
        # What others of the room have was compared before.
        slots = np.arange(len(room), dtype=np.int32)
        whole = (slice(0, len(room)),)
        start_s = 0.0 if self._observer is None else time.perf_counter()
        pending = PendingRead(layer, slots + np.int32(first), slots, whole, batch, room=room)
        return self._note_start(pending, start_s)

    def load_run(self, layer: int, first: int, room: U8) -> None:
        """Read bundles ``first``, ``first + 1``, ... of ``layer`` into ``room`` [n, stride] now."""
        self.read_run(layer, first, room)
        self.reads.read_bytes += room.nbytes

    def read_run(self, layer: int, first: int, room: U8) -> None:
        """Read as `load_run`, in any thread; the caller counts the bytes."""
        self._read(layer, first, room)
        if self._checks is not None:
            slots = np.arange(len(room), dtype=np.int32)
            self._verify(self._checks, layer, slots + np.int32(first), room, slots)

    def observe(self, observer: ReadObserver | None) -> None:
        """Tell ``observer`` of reads from now on; None ends it.  One at a time."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        if isinstance(self._engine, PreadEngine):
            self._engine.note_part = None if observer is None else observer.note_part

    def close(self) -> None:
        """Wait for reads that are on their way, and close the files."""
        self.reads.close()
        self._opened.close()


def count_reads(
    arena: U8, layers: int, loops: HostLoops, settings: ReadSettings | None = None
) -> FlashReader:
    """A reader without files, for runs whose reads are counted only."""
    file = BundleFile(path=Path(), bundles_offset=0, stride=arena.shape[1], count=0)
    return FlashReader([file] * layers, arena, settings or ReadSettings(), loops, NullEngine())


def _describe_damage(path: Path, index: int) -> UserError:
    return UserError.of(
        "P511",
        f"the neuron at place {index} of {path} is damaged: its checksum differs",
        help="find out what else is with `pi2 store verify`, then copy or make the store again",
    )
