"""Read rates of the storage, with the reader that plans use."""

import os
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from pi2.backends.host import HostLoops
from pi2.diagnostics import UserError
from pi2.memory.bundle_files import BundleFile
from pi2.memory.flash import FlashReader, ReadSettings
from pi2.memory.io_engine import EngineName
from pi2.probing.steps import collect_rounds
from pi2.probing.tokens import allocate, fill

MIB = 1 << 20
FILE_BYTES = 1024 * MIB
"""Size of the temporary file; less where there is little space or writing is slow."""
LEAST_BYTES = 128 * MIB
SAMPLE_BYTES = 32 * MIB
"""Least size of a store's file to read from: batches of the largest reads fit a few times."""
WRITE_S = 12.0
"""Seconds after which writing stops."""
ROUND_S = 0.3
_LONG_BYTES = 4 * MIB
"""Most bytes of one sequential read: about what the prefill reads at once."""
_BATCH_BYTES = 8 * MIB
OVERLAP_RUNS = 24
_MOST_BATCH = 512
"""Most reads issued together; the queue drains after each batch."""
_MISSES = 128
"""Reads during which computing is measured: about what a layer misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    pattern: Literal["sequential", "random"]
    block_bytes: int
    depth: int | None = None
    """Requests in flight, from one thread (io_uring)."""
    threads: int = 1
    range_bytes: int | None = None
    """Range of the file that they fall into; all of it if None."""
    burst: int | None = None
    """Reads that are asked for at once; None: as many as a layer may miss."""


Rates = dict[ReadSpec, list[float]]
"""Bytes per second of each, or a share, as often as it was measured."""


def list_reads(file_bytes: int, align_bytes: int = 512) -> list[ReadSpec]:
    """Reads to measure: the rate over each setting, aligned to ``align_bytes``."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    specs = [ReadSpec(**item) for item in table["reads"]]
    within = [spec for spec in specs if (spec.range_bytes or 0) < file_bytes]
    return [spec for spec in within if spec.block_bytes % align_bytes == 0]


def list_overlaps(specs: list[ReadSpec]) -> list[ReadSpec]:
    """Reads during which computing is measured: a layer's missing neurons, and a stream."""
    return [
        spec
        for spec in specs
        if spec.burst is None
        and spec.range_bytes is None
        and (spec.block_bytes, spec.pattern) in ((8192, "random"), (_LONG_BYTES, "sequential"))
        and (spec.depth is None or spec.depth >= 8)
    ]


@contextmanager
def open_sample(place: Path, most_bytes: int | None = None) -> Iterator[tuple[Path, int]]:
    """A file to read and its bytes: a store's largest, or a temporary one; UserError P341."""
    layers = sorted(place.glob("layers/*"), key=lambda item: -item.stat().st_size)
    if layers and layers[0].stat().st_size >= SAMPLE_BYTES:
        yield layers[0], layers[0].stat().st_size // MIB * MIB
        return
    place = place.parent if layers else place
    name = place / f".pi2-probe-{os.getpid()}"
    try:
        room = os.statvfs(place)
        size = min(most_bytes or FILE_BYTES, room.f_bavail * room.f_frsize // 2 // MIB * MIB)
        if size < LEAST_BYTES:
            raise UserError.of(
                "P341",
                f"{place} has no space for a file of {LEAST_BYTES // MIB} MiB to read from",
                help="--disk FOLDER names another place, or a neuron store",
            )
        try:
            yield name, _write_sample(name, size)
        finally:
            name.unlink(missing_ok=True)
    except OSError as error:
        raise UserError.of(
            "P341",
            f"cannot make a file to read from in {place}: {error.strerror}",
            help="--disk FOLDER names another place, or a neuron store",
        ) from None


def _write_sample(path: Path, size: int) -> int:
    """Write random bytes, as many as there is time for; return how many."""
    piece = fill(8 * MIB)
    done, end = 0, time.monotonic() + WRITE_S
    with path.open("wb", buffering=0) as file:
        while done < size and (done < LEAST_BYTES or time.monotonic() < end):
            piece[: 4096 * 8].view(np.int64)[:] = done  # no two pieces are equal
            file.write(piece.data)
            done += len(piece)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return done


class StorageBench:
    def __init__(self, path: str, size_bytes: int, loops: HostLoops) -> None:
        """``loops`` as in `pi2.memory.flash.FlashReader`."""
        self._path = Path(path)
        self._size = size_bytes
        self._loops = loops
        self._random = np.random.default_rng(3)
        self._readers: dict[ReadSpec, FlashReader] = {}
        self._long = allocate("", _LONG_BYTES)
        self._at = 0

    def measure(self, specs: list[ReadSpec], rounds: int) -> Rates:
        """Bytes per second of each, ``rounds`` times."""
        usable = self._list_usable(specs)
        return collect_rounds({spec: partial(self._measure, spec) for spec in usable}, rounds)

    def measure_latency(self, rounds: int) -> list[float]:
        """Median seconds of one read of 4 KiB in an idle queue."""
        try:
            fd = os.open(self._path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        except OSError:
            fd = os.open(self._path, os.O_RDONLY)
        found = []
        try:
            for _ in range(rounds):
                places = self._random.integers(0, self._size // 4096, 200) * 4096
                times = []
                for place in places.tolist():
                    start = time.perf_counter()
                    os.preadv(fd, [self._long[:4096].data], place)
                    times.append(time.perf_counter() - start)
                found.append(statistics.median(times))
        finally:
            os.close(fd)
        return found

    def measure_overlap(
        self, specs: list[ReadSpec], compute: Callable[[], None], rounds: int
    ) -> Rates:
        """Part of the shorter of reading and computing that running both saves, for each read."""
        usable = self._list_usable(specs)
        measures = {spec: partial(self._measure_saving, spec, compute) for spec in usable}
        return collect_rounds(measures, rounds)

    def _measure_saving(self, spec: ReadSpec, compute: Callable[[], None]) -> float:
        reader = self._make_reader(spec, _MISSES)
        begin = self._begin_stream if spec.pattern == "sequential" else self._begin_batch

        def run(read: bool, calls: int) -> float:
            start = time.perf_counter()
            wait = begin(reader, spec) if read else None
            for _ in range(calls):
                compute()
            if wait is not None:
                wait()
            return time.perf_counter() - start

        def find_median(read: bool, calls: int) -> float:
            return statistics.median(run(read, calls) for _ in range(OVERLAP_RUNS // 4))

        try:
            call_s = find_median(False, 4) / 4
            calls = max(1, round(find_median(True, 0) / call_s))
            # In turn: what changes meanwhile changes all three.
            ways = ((True, calls), (True, 0), (False, calls))
            times = [[run(*way) for way in ways] for _ in range(OVERLAP_RUNS)]
            both, reading, computing = np.median(np.array(times), axis=0).tolist()
            saved: float = (reading + computing - both) / min(reading, computing)
            return min(max(saved, 0.0), 1.0)
        finally:
            reader.close()

    def _begin_batch(
        self, reader: FlashReader, spec: ReadSpec, batch: int = _MISSES
    ) -> Callable[[], None]:
        """Ask for missing neurons, by default a layer's; the returned function waits for them."""
        slots = np.arange(batch, dtype=np.int32)
        count = min(spec.range_bytes or self._size, self._size) // spec.block_bytes
        indices = self._random.choice(count, batch, replace=False)
        pending = reader.start(0, np.sort(indices).astype(np.int32), slots)

        def wait() -> None:
            for number in range(len(pending.clusters)):
                reader.finish(pending, number)

        return wait

    def _begin_stream(self, reader: FlashReader, spec: ReadSpec) -> Callable[[], None]:
        if self._at + spec.block_bytes > self._size:
            self._at = 0
        first = self._at // spec.block_bytes
        self._at += spec.block_bytes
        buffer = self._long[: spec.block_bytes].reshape(1, -1)
        pending = reader.plan_run(0, first, buffer, [slice(0, 1)])
        assert pending.batch is not None
        reader.reads.submit(pending.batch)

        def wait() -> None:
            reader.finish(pending, 0)

        return wait

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _list_usable(self, specs: list[ReadSpec]) -> list[ReadSpec]:
        """Queued reads only where there are queues."""
        reader = self._make_reader(ReadSpec(pattern="random", block_bytes=4096, depth=1), 1)
        try:
            return [x for x in specs if x.depth is None or reader.engine == "io_uring"]
        finally:
            reader.close()

    def _measure(self, spec: ReadSpec) -> float:
        if spec.pattern == "random":
            return self._read_at_random(spec)
        reader = self._make_reader(spec, 1)
        try:
            return _find_rate(spec.block_bytes, lambda: self._begin_stream(reader, spec)())
        finally:
            reader.close()

    def _read_at_random(self, spec: ReadSpec) -> float:
        batch = spec.burst or min(_MOST_BATCH, max(32, _BATCH_BYTES // spec.block_bytes))
        if spec not in self._readers:
            self._readers[spec] = self._make_reader(spec, batch)
        reader = self._readers[spec]
        size = batch * spec.block_bytes
        return _find_rate(size, lambda: self._begin_batch(reader, spec, batch)())

    def _make_reader(self, spec: ReadSpec, batch: int) -> FlashReader:
        engine: EngineName = "pread" if spec.depth is None else "io_uring"
        settings = ReadSettings(
            engine=engine,
            threads=spec.threads,
            depth=spec.depth or 1,
            # With threads, a batch is divided among them; with a queue, it stays in one piece.
            cluster=1 << 20 if spec.depth is not None else -(-batch // spec.threads),
        )
        file = BundleFile(
            path=self._path,
            bundles_offset=0,
            stride=spec.block_bytes,
            count=self._size // spec.block_bytes,
        )
        arena = allocate("", batch * spec.block_bytes).reshape(batch, spec.block_bytes)
        return FlashReader([file], arena, settings, self._loops)


def _find_rate(size_bytes: int, read: Callable[[], object]) -> float:
    """Bytes per second of calls that read so many, over a round."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < ROUND_S:
        read()
        done += size_bytes
    return done / (time.perf_counter() - start)
