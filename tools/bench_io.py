"""Compare the I/O engines: random reads of neurons, by engine, threads, depth and gap.

    python tools/bench_io.py STORE_OR_FILE [--stride "7168 B"] [--seconds 1]

Reads go to random places of a file (of a store: its largest layers) past the page cache, in batches
as a layer's misses come: ascending places, all of a batch before the next.  Prints bytes wanted per
second, requests per second, and processor time per request (a core's, kernel included).
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import U8
from pi2.backends.host import HostLoops, load_host_loops
from pi2.memory.budget import Budget
from pi2.memory.bundle_files import BundleFile
from pi2.memory.flash import FlashReader, ReadSettings
from pi2.memory.io_engine import EngineName
from pi2.progress import ignore_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Results of one setting."""

    wanted_mb_s: float
    requests_s: float
    cpu_us: float
    """Processor time per request."""


def find_files(path: Path) -> list[Path]:
    """The layers of a store, or a file."""
    return sorted(path.glob("layers/*.arrow"))[:8] if path.is_dir() else [path]


def measure(
    files: list[BundleFile], arena: U8, settings: ReadSettings, loops: HostLoops, args: Arguments
) -> Figures:
    """Read random batches for ``args.seconds``."""
    random = np.random.default_rng(0)
    reader = FlashReader(files, arena, settings, loops)
    assert reader.engine == settings.engine, reader.engine_fallback
    layers = itertools.cycle(range(len(files)))
    spent, wanted, requests = 0.0, 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    while (spent := time.perf_counter() - start) < args.seconds:
        layer = next(layers)
        size = int(files[layer].count * args.spread)
        indices = np.sort(random.choice(size, args.batch, replace=False)).astype(np.int32)
        slots = random.permutation(len(arena))[: args.batch].astype(np.int32)
        pending = reader.start(layer, indices, slots)
        for number in range(len(pending.clusters)):
            reader.finish(pending, number)
        assert pending.batch is not None
        requests += len(pending.batch.firsts)
        wanted += args.batch * arena.shape[1]
    after = resource.getrusage(resource.RUSAGE_SELF)
    reader.close()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figures(
        wanted_mb_s=wanted / spent / 1e6, requests_s=requests / spent, cpu_us=cpu_s / requests * 1e6
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of the command line."""

    seconds: float
    batch: int
    spread: float


def list_settings(threads: list[int], depths: list[int], gaps: list[int]) -> Iterator[ReadSettings]:
    """List the settings to compare."""
    for gap in gaps:
        for count in threads:
            yield make_settings("pread", count, 1, gap)
        for depth in depths:
            yield make_settings("io_uring", 1, depth, gap)


def make_settings(engine: EngineName, threads: int, depth: int, gap: int) -> ReadSettings:
    """A row of the table."""
    cluster = 8 if engine == "pread" else 1 << 20
    return ReadSettings(engine=engine, threads=threads, depth=depth, merge_gap=gap, cluster=cluster)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compare the I/O engines.")
    parser.add_argument("path", type=Path, help="a neuron store, or a large file")
    parser.add_argument("--stride", type=int, default=7168, help="bytes per neuron")
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    parser.add_argument("--batch", type=int, default=128, help="neurons per batch")
    parser.add_argument(
        "--spread", type=float, default=1.0, help="share of a file that neurons are taken from"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--gaps", type=int, nargs="+", default=[0])
    parsed = parser.parse_args()
    arguments = Arguments(seconds=parsed.seconds, batch=parsed.batch, spread=parsed.spread)
    stride: int = parsed.stride
    files = [
        BundleFile(
            path=path,
            bundles_offset=4096,
            stride=stride,
            count=(path.stat().st_size - 4096) // stride,
        )
        for path in find_files(parsed.path)
    ]
    arena = Budget({"cold": 2048 * stride}).allocate("cold", 2048 * stride).reshape(-1, stride)
    arena[:] = 1
    loops = load_host_loops(ignore_progress)
    for file in files:  # mmap would otherwise find everything in the page cache
        with file.path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    print(f"{stride} bytes, batches of {arguments.batch}, {len(files)} files")
    print("| engine | threads | depth | gap | MB/s wanted | requests/s | CPU us per request |")
    print("|---|---|---|---|---|---|---|")
    for settings in list_settings(parsed.threads, parsed.depths, parsed.gaps):
        figures = measure(files, arena, settings, loops, arguments)
        depth = settings.depth if settings.engine == "io_uring" else settings.threads
        threads = "-" if settings.engine == "io_uring" else settings.threads
        print(
            f"| {settings.engine} | {threads} | {depth} | {settings.merge_gap} "
            f"| {figures.wanted_mb_s:.0f} | {figures.requests_s:.0f} | {figures.cpu_us:.1f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
