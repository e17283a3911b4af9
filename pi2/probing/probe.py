"""Measure this machine: memory, kernels, storage and noise, each in a process of its own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from pi2.benchmarks.bandwidth import MeterRecipe
from pi2.benchmarks.worker import Worker
from pi2.diagnostics import UserError
from pi2.machine import Machine, Storage, detect_machine, inspect_storage
from pi2.probing.accelerators import Accelerators, measure_accelerators
from pi2.probing.kernels import KernelRecipe
from pi2.probing.model import SMALL
from pi2.probing.series import Key, is_agreed
from pi2.probing.storage import ReadSpec, list_overlaps, list_reads, open_sample
from pi2.probing.timing import StepFacts, keep_possible
from pi2.progress import Progress

MOST_ROUNDS, LEAST_ROUNDS = 5, 2
"""Bounds of the number of rounds over all figures; a figure of a round is the median, or the
sum, of many calls."""
UNIT_ROUNDS = 3
"""Rounds over GPUs and NPUs; one where the rest took all the time there is."""
ROUNDS_S = 80.0
"""No round begins that would end later; the whole takes about two minutes, or more beside the work
of others."""
AGAIN_S = 15.0
"""Time beyond that in which figures are measured again that no two rounds agree about."""
USUAL_START_S = 15.0
"""Time to start where all kernels are compiled."""
STEADY_PIECES = 50
"""Times of equal work in a round."""
METER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was found out.  Times in seconds, rates in bytes per second."""

    machine: Machine
    storage: Storage
    threads: int
    bandwidth: dict[int, list[float]]
    """Read bandwidth of main memory by number of threads."""
    read_work: str = "compiled loop"
    """What has read it."""
    steps: tuple[StepFacts, ...]
    step_s: dict[Key, list[float]]
    reads: tuple[ReadSpec, ...]
    read_bytes_s: dict[Key, list[float]]
    latency_s: list[float]
    overlap: dict[Key, list[float]]
    """Part of the shorter one of reading and computing that is saved where both go on at once."""
    steady_s: list[float]
    """Times of the same piece of work."""
    steady_work: str = "the same projections"
    """What that was."""
    accelerators: Accelerators = field(default_factory=Accelerators)
    """GPUs and NPUs."""


def measure_machine(place: Path, progress: Progress, *, rounds: int = MOST_ROUNDS) -> Measurements:
    """Measure everything; ``place`` is a folder for a temporary file, or a neuron store.

    Rounds go through everything from the first to the last, so that a machine whose speed drifts
    shows it in the spread of every figure.

    UserError P340 where the cpu backend cannot run here, P341 where nothing can be read.
    """
    machine = detect_machine()
    check_backend(machine)
    threads = machine.cores
    recipe = KernelRecipe(
        threads=threads, features=frozenset(machine.features), architecture=machine.architecture
    )
    found = _Rounds()
    begun = time.monotonic()
    with ExitStack() as stack:
        bench = stack.enter_context(Worker(recipe, progress))
        small = stack.enter_context(Worker(replace(recipe, sizes=SMALL), progress))
        steps: list[StepFacts] = [*bench.call("list_steps"), *small.call("list_steps")]
        path, size = stack.enter_context(open_sample(place))
        bench.call("open_storage", str(path), size)
        reads = list_reads(size, inspect_storage(place).direct.align_bytes or 512)
        start = time.monotonic()
        for number in range(rounds):
            progress("rounds", number / rounds)
            for count in sorted({1, threads // 2 or 1, threads}):
                # A new process each time: threads that slept may stay together on one core.
                meter_recipe = MeterRecipe(threads=count, size_bytes=METER_BYTES)
                with Worker(meter_recipe) as meter:
                    found.add("bandwidth", {(str(count),): [max(meter.call("measure"))]})
            for worker in (bench, small):
                found.add("steps", worker.call("measure", 1))
            found.add("reads", bench.call("measure_reads", reads, 1))
            found.add("latency", {(): bench.call("measure_latency", 1)})
            found.add("overlap", bench.call("measure_overlap", list_overlaps(reads), 1))
            found.add("steady", {(): bench.call("measure_steady", STEADY_PIECES)})
            # Where kernels had to be compiled first, fewer rounds are left.
            limit_s = ROUNDS_S - max(start - begun - USUAL_START_S, 0.0)
            if not has_time(time.monotonic() - start, number + 1, limit_s):
                break
        while time.monotonic() - start <= limit_s + AGAIN_S:
            if not _measure_again(found, reads, bench, small):
                break
        progress("rounds", 1.0)
        late = time.monotonic() - begun > USUAL_START_S + ROUNDS_S
    rates = found["reads"]
    return Measurements(
        machine=machine,
        storage=inspect_storage(place),
        threads=threads,
        bandwidth={int(count): values for (count,), values in found["bandwidth"].items()},
        steps=tuple(steps),
        step_s=found["steps"],
        reads=tuple(spec for spec in reads if spec.key in rates),
        read_bytes_s=rates,
        latency_s=found["latency"][()],
        overlap=found["overlap"],
        steady_s=found["steady"][()],
        accelerators=measure_accelerators(progress, rounds=1 if late else UNIT_ROUNDS),
    )


def has_time(passed_s: float, done: int, limit_s: float = ROUNDS_S) -> bool:
    """Whether another round fits after ``done`` of them."""
    return done < LEAST_ROUNDS or passed_s * (done + 1) / done <= limit_s


def _measure_again(found: _Rounds, reads: Sequence[ReadSpec], bench: Worker, small: Worker) -> bool:
    """Measure once more what no two rounds agree about; whether there was anything."""
    rates = [rate for values in found["bandwidth"].values() for rate in values]
    steps: set[Key] = set()
    for worker in (bench, small):
        own = {
            step.key
            for step in worker.call("list_steps")
            if not is_agreed(keep_possible(step, found["steps"][step.key], max(rates)), "less")
        }
        steps |= own
        if own:
            found.add("steps", worker.call("measure", 1, own))
    reached = found["reads"]
    unclear = [
        spec for spec in reads if spec.key in reached and not is_agreed(reached[spec.key], "more")
    ]
    if unclear:
        found.add("reads", bench.call("measure_reads", unclear, 1))
    return bool(steps or unclear)


class _Rounds(defaultdict[str, dict[Key, list[float]]]):
    """Measurements of all rounds, by kind and key."""

    def __init__(self) -> None:
        super().__init__(dict)

    def add(self, kind: str, more: dict[Key, list[float]]) -> None:
        """Put a round's measurements behind those before."""
        for key, values in more.items():
            self[kind].setdefault(key, []).extend(values)


def check_backend(machine: Machine) -> None:
    """UserError P340 where there are no kernels to measure."""
    from pi2.backends.cpu import backend as cpu

    obstacles: Sequence[str] = cpu.find_obstacles(frozenset(machine.features), machine.architecture)
    if obstacles:
        raise UserError.of(
            "P340",
            f"pi2's kernels cannot run here, so they cannot be measured: {'; '.join(obstacles)}",
            help="install what is missing: `pi2 doctor` lists it",
        )
