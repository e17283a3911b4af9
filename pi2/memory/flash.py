"""Reads of neurons from flash: scattered bundles into slots, long runs into buffers."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import I32, U8, Bits
from pi2.diagnostics import UserError
from pi2.memory.bundle_files import BundleFile, BundleFiles, NeuronChecks, ReadObserver, WatchedRun
from pi2.memory.host_loops import HostLoops
from pi2.memory.io_engine import (
    EngineName,
    Merging,
    PreadEngine,
    ReadBatch,
    divide_clusters,
    divide_requests,
    find_addresses,
    keep_gates,
    make_batch,
    make_readers,
    make_reads,
)
from pi2.memory.uring import UringEngine, open_engine

_PAGE = 4096


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


class FlashReader:
    """Reads bundles as a plan says; one caller at a time."""

    def __init__(
        self, files: Sequence[BundleFile], arena: U8, settings: ReadSettings, loops: HostLoops
    ) -> None:
        """``arena`` [slots, stride]; ``loops`` prepare and issue reads in compiled code."""
        self._arena = arena
        self._address: int = arena.ctypes.data
        self._loops = loops
        self._settings = settings
        self._observer: ReadObserver | None = None
        self.read_bytes = 0
        self.waited_s = 0.0
        """Seconds of waiting for neurons."""
        self.gate_reads = 0
        """Neurons whose gate was read by itself."""
        self.saved_bytes = 0
        """Bytes of up and down that were not read, because the gate was closed."""
        self._checks: NeuronChecks | None = None
        self._scratch = np.empty(0, np.uint8)
        self._opened = BundleFiles(
            files,
            direct=settings.direct,
            gate_bytes=settings.gate_bytes,
            # A slot's content is overwritten before anybody uses it.
            room=arena[-1] if len(arena) else np.empty(0, np.uint8),
        )
        self._files = self._opened.files
        self._gate_bytes = self._opened.gate_bytes
        self.fallback = self._opened.fallback
        """Why direct reads were given up, if they were."""
        self.phases_fallback = self._opened.phases_fallback
        """Why gates are not read first, if the plan wants it."""
        try:
            self._engine, self.engine, self.engine_fallback = open_engine(
                settings, self._opened.descriptors, loops
            )
        except BaseException:
            self.close()
            raise
        # One run is compared with its checks while the next one is read.
        self._runs = make_readers(2 if settings.verify else 1, "pi2-stream")
        self._one_run = threading.Lock()
        if settings.verify:
            checks = [file.read_checks() for file in files if file.read_checks is not None]
            assert len(checks) == len(files), "files without checks cannot be verified"
            self._checks = NeuronChecks(checks, loops)
        self._merging = self._make_merging(settings.merge_gap)

    def _make_merging(self, gap: int) -> Merging:
        if gap == 0 or not self._files:
            return Merging()
        stride = self._files[0].stride
        room = np.zeros(stride + _PAGE, np.uint8)
        start = -room.ctypes.data % _PAGE
        self._scratch = room[start : start + stride]
        return Merging(gap=gap, scratch=self._scratch.ctypes.data)

    def start(self, layer: int, indices: I32, slots: I32) -> PendingRead:
        """Begin to read bundles ``indices`` [n] (ascending) of ``layer`` into ``slots`` [n], or
        their gates; unchecked bundles are read whole."""
        start_s = 0.0 if self._observer is None else time.perf_counter()
        file = self._files[layer]
        assert file.stride == self._arena.shape[1]
        engine = self._engine
        if (
            isinstance(engine, UringEngine)
            and len(indices)
            and not self._gate_bytes
            and not self._merging.gap
        ):
            batch = engine.submit_bundles(
                layer,
                indices,
                slots,
                base=file.bundles_offset,
                stride=file.stride,
                address=self._address,
            )
            clusters = self._divide(len(indices))
            clusters, batch.parts = divide_requests(clusters, batch.requests)
            return self._note_start(PendingRead(layer, indices, slots, clusters, batch), start_s)
        batch = make_batch(
            layer,
            indices,
            slots,
            address=self._address,
            base=file.bundles_offset,
            stride=file.stride,
            merging=self._merging,
            loops=self._loops,
        )
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
            self._submit(batch)
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
        self._submit(batch)
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

    def _submit(self, batch: ReadBatch) -> None:
        try:
            self._engine.submit(batch)
        except BaseException:
            self._engine.abandon(batch)
            raise

    def advance(self) -> None:
        """Keep the drive busy with begun reads; called between computations, never waits."""
        self._engine.advance()

    def finish(self, pending: PendingRead, number: int) -> I32:
        """Wait for a cluster and return its slots; failed or wrong reads are tried again, then
        UserError P620 or P511."""
        batch, cluster = pending.batch, pending.clusters[number]
        assert batch is not None
        slots = pending.slots[cluster]
        if len(slots) == 0:
            return slots
        start_s = time.perf_counter()
        self._engine.wait(batch, number)
        self.waited_s += time.perf_counter() - start_s
        part = batch.parts[number]
        results, sizes = batch.results[part], batch.sizes[part]
        # Methods of arrays that reduce them are Python, several times as slow as this.
        if results.tobytes() != sizes.tobytes():
            places = batch.requests[cluster] - part.start
            self._read_again(pending, cluster, np.logical_or.reduceat(results != sizes, places))
        # Bytes between neighbours were read too.
        self.read_bytes += int(np.add.reduce(sizes))
        if self._checks is not None:
            indices = pending.indices[cluster]
            self._verify(self._checks, pending.layer, indices, self._arena, slots)
        if self._observer is not None:
            self._observer.note_wait(pending, number, start_s, time.perf_counter())
        return slots

    def _read_again(self, pending: PendingRead, cluster: slice, failed: Bits) -> None:
        indices, slots = pending.indices[cluster], pending.slots[cluster]
        offset = self._files[pending.layer].bundles_offset
        for index, slot in zip(indices[failed].tolist(), slots[failed].tolist(), strict=True):
            target = self._arena[slot]
            self._opened.read(pending.layer, target, offset + index * target.size)

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
        file = self._files[layer]
        for place in damaged:
            offset = file.bundles_offset + int(indices[place]) * file.stride
            self._opened.read(layer, bundles[slots[place]], offset)
        left = checks.find_damaged(layer, indices, bundles, slots)
        if left:
            raise _describe_damage(file.path, int(indices[left[0]]))

    def start_run(self, layer: int, first: int, buffer: U8) -> Future[None]:
        """Begin to read bundles ``first``, ``first + 1``, ... of ``layer`` into ``buffer``
        [n, stride], which must be aligned to a block."""
        file = self._files[layer]
        offset = file.bundles_offset + first * file.stride
        self.read_bytes += buffer.size
        run = self._runs.submit(self._read_run, layer, first, buffer, offset)
        if self._observer is None:
            return run
        return WatchedRun(run, layer, len(buffer), self._observer)

    def read_run(self, layer: int, first: int, buffer: U8) -> None:
        """Read what `start_run` reads, now and in the calling thread; several may do so at the same
        time.  The caller counts the bytes."""
        file = self._files[layer]
        self._opened.read(layer, buffer.reshape(-1), file.bundles_offset + first * file.stride)
        self._verify_run(layer, first, buffer)

    def _read_run(self, layer: int, first: int, buffer: U8, offset: int) -> None:
        with self._one_run:
            self._opened.read(layer, buffer.reshape(-1), offset)
        self._verify_run(layer, first, buffer)

    def _verify_run(self, layer: int, first: int, buffer: U8) -> None:
        if self._checks is not None:
            slots = np.arange(len(buffer), dtype=np.int32)
            self._verify(self._checks, layer, slots + np.int32(first), buffer, slots)

    def observe(self, observer: ReadObserver | None) -> None:
        """Tell ``observer`` of reads from now on; None ends it.  One at a time."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        if isinstance(self._engine, PreadEngine):
            self._engine.note_part = None if observer is None else observer.note_part

    def close(self) -> None:
        """Wait for reads that are on their way, stop the threads and close the files."""
        for part in ("_engine", "_runs"):
            owner = self.__dict__.pop(part, None)
            if isinstance(owner, ThreadPoolExecutor):
                owner.shutdown(cancel_futures=True)
            elif owner is not None:
                owner.close()
        self._opened.close()


def _describe_damage(path: Path, index: int) -> UserError:
    return UserError.of(
        "P511",
        f"the neuron at place {index} of {path} is damaged: its checksum differs",
        help="find out what else is with `pi2 store verify`, then copy or make the store again",
    )


class NullReader:
    """Stands for a reader where nothing is to be read: counts bytes only."""

    fallback: str | None = None
    engine_fallback: str | None = None
    phases_fallback: str | None = None
    engine: EngineName = "pread"

    def __init__(self, stride: int, gate_bytes: int = 0) -> None:
        self._stride = stride
        self._gate_bytes = gate_bytes
        self.read_bytes = 0
        self.waited_s = 0.0
        self.gate_reads = 0
        self.saved_bytes = 0

    def start(self, layer: int, indices: I32, slots: I32) -> PendingRead:
        gates = np.ones(len(indices), bool) if self._gate_bytes else None
        size = self._gate_bytes or self._stride
        self.read_bytes += len(indices) * size
        self.gate_reads += len(indices) if self._gate_bytes else 0
        return PendingRead(layer, indices, slots, (slice(0, len(indices)),), None, gates)

    def start_rest(self, pending: PendingRead, number: int, opened: Bits) -> PendingRead | None:
        self.saved_bytes += int(np.count_nonzero(~opened)) * self.rest_bytes
        self.read_bytes += int(np.count_nonzero(opened)) * self.rest_bytes
        return None

    @property
    def rest_bytes(self) -> int:
        return self._stride - self._gate_bytes

    def advance(self) -> None:
        """Nothing is under way."""

    def finish(self, pending: PendingRead, number: int) -> I32:
        return pending.slots

    def abandon(self, pending: PendingRead) -> None:
        """Nothing is under way."""

    def start_run(self, layer: int, first: int, buffer: U8) -> Future[None]:
        """Count a long read; done at once."""
        self.read_bytes += buffer.size
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def observe(self, observer: ReadObserver | None) -> None:
        """There is nothing to tell of."""

    def close(self) -> None:
        """Nothing is open."""
