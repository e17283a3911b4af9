"""Measure this machine: memory, kernels, storage and noise, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pi2.benchmarks.bandwidth import MeterRecipe
from pi2.benchmarks.worker import Worker
from pi2.diagnostics import UserError
from pi2.machine import Machine, Storage, detect_machine, inspect_storage
from pi2.probing.accelerators import Accelerators, measure_accelerators
from pi2.probing.kernels import KernelRecipe
from pi2.probing.model import SMALL
from pi2.probing.series import Key, Progress
from pi2.probing.storage import ReadSpec, list_overlaps, list_reads, open_sample
from pi2.probing.timing import StepFacts

ROUNDS = 3
"""Of everything; each is the median, or the sum, of many calls."""
STEADY_PIECES = 200
METER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was found out.  Times in seconds, rates in bytes per second."""

    machine: Machine
    storage: Storage
    threads: int
    bandwidth: dict[int, list[float]]
    """Read bandwidth of main memory by number of threads."""
    steps: tuple[StepFacts, ...]
    step_s: dict[Key, list[float]]
    reads: tuple[ReadSpec, ...]
    read_bytes_s: dict[Key, list[float]]
    latency_s: list[float]
    overlap: dict[Key, list[float]]
    """Part of the shorter one of reading and computing that is saved where both go on at once."""
    steady_s: list[float]
    """Times of the same piece of work."""
    accelerators: Accelerators = field(default_factory=Accelerators)
    """GPUs and NPUs."""


def measure_machine(place: Path, progress: Progress, *, rounds: int = ROUNDS) -> Measurements:
    """Measure everything; ``place`` is a folder for a temporary file, or a neuron store.

    UserError P340 where the cpu backend cannot run here, P341 where nothing can be read.
    """
    machine = detect_machine()
    check_backend(machine)
    threads = machine.cores
    bandwidth = {}
    counts = sorted({1, threads // 2 or 1, threads})
    for number, count in enumerate(counts):
        progress("memory", number / len(counts))
        with Worker(MeterRecipe(threads=count, size_bytes=METER_BYTES)) as meter:
            bandwidth[count] = [max(meter.call("measure")) for _ in range(rounds)]
    progress("memory", 1.0)
    recipe = KernelRecipe(
        threads=threads, features=frozenset(machine.features), architecture=machine.architecture
    )
    with (
        Worker(recipe, progress) as bench,
        Worker(replace(recipe, sizes=SMALL), progress) as small,
    ):
        steps: list[StepFacts] = [*bench.call("list_steps"), *small.call("list_steps")]
        step_s: dict[Key, list[float]] = {}
        for number in range(rounds):
            _extend(step_s, bench.call("measure", 1))
            _extend(step_s, small.call("measure", 1))
            progress("kernels", (number + 1) / rounds)
        with open_sample(place) as (path, size):
            bench.call("open_storage", str(path), size)
            align = inspect_storage(place).direct.align_bytes
            reads = list_reads(size, align or 512)
            rates: dict[Key, list[float]] = {}
            for number in range(rounds):
                _extend(rates, bench.call("measure_reads", reads, 1))
                progress("storage", (number + 1) / rounds)
            latency: list[float] = bench.call("measure_latency", rounds)
            overlap: dict[Key, list[float]] = bench.call(
                "measure_overlap", list_overlaps(reads), rounds
            )
        steady: list[float] = bench.call("measure_steady", STEADY_PIECES)
        # The kernels once more: half a minute later, the machine may have another speed.
        _extend(step_s, bench.call("measure", 1))
        _extend(step_s, small.call("measure", 1))
    return Measurements(
        machine=machine,
        storage=inspect_storage(place),
        threads=threads,
        bandwidth=bandwidth,
        steps=tuple(steps),
        step_s=step_s,
        reads=tuple(spec for spec in reads if spec.key in rates),
        read_bytes_s=rates,
        latency_s=latency,
        overlap=overlap,
        steady_s=steady,
        accelerators=measure_accelerators(progress, rounds=rounds),
    )


def check_backend(machine: Machine) -> None:
    """UserError P340 where there are no kernels to measure."""
    from pi2.backends import cpu

    obstacles: Sequence[str] = cpu.find_obstacles(frozenset(machine.features), machine.architecture)
    if obstacles:
        raise UserError.of(
            "P340",
            f"pi2's kernels cannot run here, so they cannot be measured: {'; '.join(obstacles)}",
            help="install what is missing: `pi2 doctor` lists it",
        )


def _extend(total: dict[Key, list[float]], more: dict[Key, list[float]]) -> None:
    for key, values in more.items():
        total.setdefault(key, []).extend(values)
