"""``python -m pi2_phone --probe``: a device file of what a bundle can measure by itself.

Flash is measured with the reader that runs use, memory by numpy's largest of many numbers, noise by
equal pieces of that.  Kernels are not timed: `pi2 plan` estimates them from the memory's rate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pi2.backends.host import load_host_loops
from pi2.benchmarks.bandwidth import BandwidthMeter
from pi2.diagnostics import UserError
from pi2.machine import detect_machine, inspect_storage
from pi2.phone.runtime.toml_text import write_toml
from pi2.probing.document import describe_device
from pi2.probing.probe import Measurements
from pi2.probing.series import Key
from pi2.probing.storage import StorageBench, list_reads, open_sample
from pi2.progress import ignore_progress

ROUNDS = 3
METER_BYTES = 128 << 20
STEADY_BYTES = 8 << 20
STEADY_PIECES = 50
SUFFIX = ".device.toml"


def write_probe(output: Path, place: Path, *, rounds: int = ROUNDS) -> None:
    """Measure this machine, the storage at the folder ``place``, and write ``output``, a new file.

    UserError P675 if it exists, or cannot be written; P341 where nothing can be read.
    """
    if output.exists():
        raise UserError.of("P675", f"{output} exists already", help="choose another name with -o")
    name = output.name.removesuffix(SUFFIX).removesuffix(".toml").lower()
    text = (
        "# Written by `python -m pi2_phone --probe`: no serial numbers, host names or accounts.\n"
    )
    text += write_toml(describe_device(name, measure(place, rounds)))
    try:
        temporary = output.with_name(f".{output.name}.part")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output)
    except OSError as error:
        raise UserError.of("P675", f"{output} cannot be written: {error.strerror}") from None


def measure(place: Path, rounds: int) -> Measurements:
    """Measure everything ``rounds`` times, one after the other."""
    machine, storage = detect_machine(), inspect_storage(place)
    threads = machine.cores
    loops = load_host_loops(ignore_progress, machine.features)
    bandwidth: dict[int, list[float]] = {}
    rates: dict[Key, list[float]] = {}
    latency_s: list[float] = []
    with open_sample(place) as (path, size):
        bench = StorageBench(str(path), size, loops)
        reads = list_reads(size, storage.direct.align_bytes or 512)
        try:
            for _ in range(rounds):
                for count in sorted({1, threads // 2 or 1, threads}):
                    meter = BandwidthMeter(count, METER_BYTES)
                    bandwidth.setdefault(count, []).append(max(meter.measure()))
                    meter.close()
                _extend(rates, bench.measure(reads, 1))
                latency_s += bench.measure_latency(1)
        finally:
            bench.close()
    return Measurements(
        machine=machine,
        storage=storage,
        threads=threads,
        bandwidth=bandwidth,
        read_work="numpy maximum",
        steps=(),
        step_s={},
        reads=tuple(spec for spec in reads if spec.key in rates),
        read_bytes_s=rates,
        latency_s=latency_s,
        overlap={},
        steady_s=measure_steady(),
        steady_work="the maximum of 8 MiB",
    )


def _extend(found: dict[Key, list[float]], more: Mapping[Key, Sequence[float]]) -> None:
    for key, values in more.items():
        found.setdefault(key, []).extend(values)


def measure_steady() -> list[float]:
    """Seconds of equal pieces of work, on one core."""
    import numpy as np

    numbers: Any = np.ones(STEADY_BYTES // 8, np.uint64)
    times = []
    for _ in range(STEADY_PIECES):
        start = time.perf_counter()
        numbers.max()
        times.append(time.perf_counter() - start)
    return times
