"""Time loading against the disk and the first touch of memory, each in a process of its own.

    python tools/measure_loading.py my.plan.toml other.plan.toml -r 3
    python tools/measure_loading.py model.gguf --set memory.weights=loaded --json

On a virtual machine a first touch may be many times as slow as a second one.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.caches import open_regular
from pi2.measuring.contestant import Worker
from pi2.measuring.report import describe_conditions
from pi2.memory.bulk_load import PIECE_BYTES, READERS, touch_memory
from pi2.memory.io_engine import make_readers
from pi2.plan.documents.quantities import write_table
from pi2.progress import Progress, ignore_progress
from pi2.refit import FittedPlan, read_plan
from pi2.store.manifest import read_manifest
from pi2.weights.gguf_weights import GgufWeights

HUGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """A load and its bounds; seconds."""

    load_s: float
    user_s: float
    """Processor time of the load, in the program."""
    system_s: float
    """Processor time of the load, in the system."""
    reads_s: float
    """The same bytes in direct reads of 1 MiB, several in flight."""
    touch_s: float
    """Touching as much memory, in pages of 2 MiB, by one thread."""
    touch_again_s: float
    """The same, directly afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    plan: str
    loaded_bytes: int
    samples: tuple[LoadSample, ...]

    def take_median(self, name: str) -> float:
        values: list[float] = [getattr(sample, name) for sample in self.samples]
        return statistics.median(values)


class LoadMeter:
    """The measurements; each process makes one."""

    def __init__(self, progress: Progress) -> None:
        pass

    def load(self, path: Path, overrides: Mapping[str, object]) -> tuple[float, float, float, int]:
        """Load a plan: seconds, processor seconds in the program and the system, bytes."""
        from pi2.orchestrator import load

        before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        with load(path, set=overrides) as model:
            seconds = time.perf_counter() - start_s
            after = resource.getrusage(resource.RUSAGE_SELF)
            used = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
            return seconds, *used, model.loaded_bytes

    def touch(self, size: int) -> float:
        """Seconds that touching ``size`` bytes of new memory takes."""
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(region, np.uint8)
        start_s = time.perf_counter()
        touch_memory(memory.ctypes.data, size)
        # Where the system cannot touch for us.
        memory[::HUGE_BYTES] = 1
        return time.perf_counter() - start_s

    def read(self, files: Sequence[Path], size: int) -> float:
        """Seconds that reading ``size`` bytes of ``files`` takes, in pieces of `PIECE_BYTES`."""
        descriptors = [_open(file) for file in files]
        jobs = _list_jobs(descriptors, size)
        lock = threading.Lock()

        def read_on() -> None:
            room = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)
            room[:] = 1
            while True:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                os.preadv(job[0], [room.data], job[1])

        start_s = time.perf_counter()
        with make_readers(READERS, "pi2-read") as pool:
            for thread in [pool.submit(read_on) for _ in range(READERS)]:
                thread.result()
        seconds = time.perf_counter() - start_s
        for descriptor in descriptors:
            os.close(descriptor)
        return seconds

    def close(self) -> None:
        """Nothing is kept."""


def _open(file: Path) -> int:
    try:
        return open_regular(file, getattr(os, "O_DIRECT", 0))
    except OSError:
        return open_regular(file)


def _list_jobs(descriptors: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    done = 0
    for descriptor in descriptors:
        for offset in range(0, os.fstat(descriptor).st_size - PIECE_BYTES + 1, PIECE_BYTES):
            if done >= size:
                return
            yield descriptor, offset
            done += PIECE_BYTES


def forget_pages(files: Sequence[Path]) -> None:
    if hasattr(os, "posix_fadvise"):
        for file in files:
            descriptor = open_regular(file)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure_load(
    plan: FittedPlan, *, repetitions: int, progress: Progress = ignore_progress
) -> LoadOutcome:
    """Load the plan several times with a cold page cache, after a warm-up that compiles kernels."""
    (path, overrides), file, store = plan.origin, plan.resolved.file, plan.resolved.store_path
    if file is not None:
        assert isinstance(file.weights, GgufWeights)
        files = list(file.weights.files)
    else:
        files = [store / entry.path for entry in read_manifest(store).files]
    size = _run("load", path, overrides)[-1]
    samples = []
    for number in range(repetitions):
        progress("loading", number / repetitions)
        reads_s = _run("read", files, size)
        forget_pages(files)
        # Meanwhile a host has had time to take the memory that the last load gave back.
        touch_s = _run("touch", size)
        touch_again_s = _run("touch", size)
        load_s, user_s, system_s, _ = _run("load", path, overrides)
        samples.append(
            LoadSample(
                load_s=load_s,
                user_s=user_s,
                system_s=system_s,
                reads_s=reads_s,
                touch_s=touch_s,
                touch_again_s=touch_again_s,
            )
        )
    return LoadOutcome(plan=path.name, loaded_bytes=size, samples=tuple(samples))


def _run(name: str, *arguments: Any) -> Any:
    with Worker(LoadMeter) as worker:
        return worker.call(name, *arguments)


def describe_load(outcome: LoadOutcome) -> dict[str, Any]:
    return {
        "plan": outcome.plan,
        "loaded_bytes": outcome.loaded_bytes,
        "samples": [asdict(sample) for sample in outcome.samples],
        "times_reads": outcome.take_median("load_s") / outcome.take_median("reads_s"),
    }


def write_loads(outcomes: Sequence[LoadOutcome]) -> str:
    titles = "plan | GB | load s | GB/s | reads s | load / reads | first touch s | touch again s"
    rows = []
    for item in outcomes:
        gigabytes = item.loaded_bytes / 1e9
        load, reads, first, again, user, system = (
            item.take_median(name)
            for name in ("load_s", "reads_s", "touch_s", "touch_again_s", "user_s", "system_s")
        )
        figures = gigabytes, load, gigabytes / load, reads, load / reads, first, again, user, system
        rows.append((item.plan, *(f"{figure:.2f}" for figure in figures)))
    return "\n".join(write_table(f"{titles} | user s | system s", rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print; exit code 2 where nothing is loaded."""
    parser = argparse.ArgumentParser(description="Time loading against disk and memory.")
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    overrides = dict(item.split("=", 1) for item in given.set)
    plans = [read_plan(path, overrides=overrides) for path in given.plans]
    if any(item.resolved.plan.memory.weights == "mapped" for item in plans if item.resolved.file):
        print("a mapped file is read when it is used: --set memory.weights=loaded")
        return 2
    outcomes = [measure_load(plan, repetitions=given.repetitions) for plan in plans]
    conditions = describe_conditions(None)
    if given.json:
        rows = [describe_load(outcome) for outcome in outcomes]
        print(json.dumps({"conditions": asdict(conditions), "loads": rows}, indent=1))
    else:
        print(f"{write_loads(outcomes)}\n\n{conditions.machine}, {conditions.started}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
