"""Measure this machine: memory, kernels, storage and noise, each in a process of its own."""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pi2.backends.blocks.contract import BlockSpec
from pi2.backends.cpu.request import list_specs
from pi2.backends.executor import Executor
from pi2.backends.gpu.devices import Survey
from pi2.backends.gpu.kernels.specification import Api
from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.backends.host import load_host_loops
from pi2.backends.kernels.spec import KernelSpec
from pi2.diagnostics import UserError
from pi2.fitting import find_executor_backend
from pi2.machine import (
    Machine,
    Storage,
    bind_calling_thread,
    detect_machine,
    inspect_storage,
    list_allowed_cores,
)
from pi2.measuring.contestant import BandwidthMeter, Worker
from pi2.probing import tokens
from pi2.probing.steps import (
    EXACT,
    GATES,
    USUAL,
    VARIANTS,
    Probed,
    StepFacts,
    Steps,
    Times,
    TokenSteps,
    Variety,
    add_figures,
    collect_rounds,
    is_agreed,
    keep_possible,
)
from pi2.probing.storage import (
    Rates,
    ReadSpec,
    StorageBench,
    list_overlaps,
    list_reads,
    open_sample,
)
from pi2.probing.tokens import SMALL
from pi2.progress import Progress, ignore_progress

MEASURED: tuple[Api, ...] = ("cuda", "webgpu", "opencl")
"""APIs whose devices are measured, best first: a GPU that several find is measured through one."""
_BY_HAND = "published figures can be stated by hand"
_FILES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
"""Units by the system's files, GPUs and NPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMeasurements:
    """A unit and the seconds of its steps."""

    facts: DeviceFacts
    step_s: Times


@dataclass(slots=True, kw_only=True)
class Accelerators:
    """Measured units, and a line about each unit that was not measured."""

    units: list[UnitMeasurements] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_accelerators(
    progress: Progress, *, rounds: int, root: Path = Path("/"), apis: Sequence[Api] = MEASURED
) -> Accelerators:
    """Measure the devices of ``apis``; ``root``: folder with the device files of others."""
    survey = Accelerators()
    reasons: list[str] = []
    for place, api in enumerate(apis):
        obstacle = _measure_api(survey, api, progress, rounds)
        if obstacle is not None:
            reasons.append(obstacle)
        progress("GPUs", (place + 1) / len(apis))
    has_gpu = any(not item.facts.is_emulated for item in survey.units)
    survey.notes += _name_others(root, reasons, has_gpu=has_gpu)
    return survey


def _measure_api(survey: Accelerators, api: Api, progress: Progress, rounds: int) -> str | None:
    """Measure what an API has and no other API had; return why it has none."""
    from pi2.probing.gpus import GpuBench

    number, count = 0, 1
    while number < count:
        # A process for each: what one driver does wrong is not the next one's loss.
        name = f"{api} device {number}"
        try:
            with Worker(GpuBench, progress) as bench:
                found: Survey = bench.call("survey", api)
                count = len(found.devices)
                if not found.devices:
                    return f"{api}: {found.obstacle}" + (f" ({found.help})" if found.help else "")
                facts = found.devices[number]
                name = f"{facts.name} ({facts.driver})"
                known = {item.facts.name for item in survey.units}
                if facts.is_emulated or facts.name not in known:
                    step_s: Times = bench.call("measure", api, number, rounds)
                    survey.units.append(UnitMeasurements(facts=facts, step_s=step_s))
        except (UserError, RuntimeError) as error:
            survey.notes.append(f"{name} was found, but not measured: {_shorten(error)}")
        number += 1
    return None


def _shorten(error: UserError | RuntimeError) -> str:
    if isinstance(error, UserError):
        return error.diagnostics[0].message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "unknown"


def _name_others(root: Path, reasons: Sequence[str], *, has_gpu: bool) -> Iterator[str]:
    """Units seen by system files and not measured; ``reasons``: why APIs have no devices."""
    seen: set[str] = set()
    for kind, files in _FILES.items():
        for pattern, what in files.items():
            found: list[Any] = sorted(root.glob(pattern))
            if (kind == "gpu" and has_gpu) or not found or what in seen:
                continue
            seen.add(what)
            why = [*reasons, _BY_HAND] if kind == "gpu" else [_BY_HAND]
            place = found[0].relative_to(root)
            yield f"{what} was found (/{place}), but not measured: {'; '.join(why)}"
            if kind == "gpu":
                break


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecipe:
    """Makes a `KernelBench` in a process of its own, which takes 700 MB."""

    threads: int
    features: frozenset[str]
    architecture: str
    sizes: tokens.ProbeShape = tokens.LARGE
    varieties: tuple[Variety, ...] = (USUAL, GATES, EXACT)

    def __call__(self, progress: Progress) -> KernelBench:
        return KernelBench(self, progress)

    def list_specs(self) -> list[KernelSpec | BlockSpec]:
        request = tokens.make_request(
            tokens.make_model(self.sizes),
            threads=self.threads,
            features=self.features,
            architecture=self.architecture,
            progress=ignore_progress,
            filled=False,
        )
        requests = [variety.choose_types(request) for variety in self.varieties]
        return list(dict.fromkeys(spec for own in requests for spec in list_specs(own)))


class KernelBench:
    """Kernels, weights and a neuron cache."""

    def __init__(self, recipe: KernelRecipe, progress: Progress) -> None:
        backend = find_executor_backend("cpu")
        assert backend is not None, "the CPU's backend computes models"
        self._free = list_allowed_cores()
        cores = tuple(self._free) if len(self._free) == recipe.threads else ()
        model = tokens.make_model(recipe.sizes)
        request = tokens.make_request(
            model,
            threads=recipe.threads,
            features=recipe.features,
            architecture=recipe.architecture,
            progress=progress,
        )
        # Each thread has a core of its own: else the system puts two on one where others work.
        request = replace(request, cores=cores)
        self._bound = cores[:1]
        layers = min(recipe.sizes.layers, recipe.sizes.arena_neurons // recipe.sizes.neurons)
        executors = {
            variety: backend.build(variety.apply(request, layers))
            for variety in dict.fromkeys((USUAL, *recipe.varieties))
        }
        self._executors: list[Executor] = list(executors.values())
        self._probed = Probed(
            model=model,
            sizes=recipe.sizes,
            arena=tokens.make_arena(model, recipe.sizes.arena_neurons),
            used_bytes=request.bundle.used_bytes,
            loops=load_host_loops(progress, frozenset(recipe.features)),
        )
        self._made = Steps(executors[USUAL], self._probed)
        self._steps = dict(self._made.list_all())
        self._tokens = [
            TokenSteps(executors[variety], self._probed, variety) for variety in recipe.varieties
        ]
        self.storage: StorageBench | None = None

    def measure(self, rounds: int, steps: Collection[StepFacts] | None = None) -> Times:
        """``rounds`` figures of seconds per call of each step, or of ``steps`` at least."""
        if self._bound:
            bind_calling_thread(self._bound)
        try:
            return self._measure(rounds, steps)
        finally:
            if self._bound:
                # Threads that read would be bound with it.
                bind_calling_thread(self._free)

    def _measure(self, rounds: int, steps: Collection[StepFacts] | None) -> Times:
        timers = {x: timer for x, timer in self._steps.items() if steps is None or x in steps}
        timed, found = collect_rounds(timers, rounds), dict[StepFacts, list[float]]()
        for _ in range(rounds):
            for item in self._tokens:
                if steps is None or not item.steps.keys().isdisjoint(steps):
                    for step, seconds in item.measure().items():
                        found.setdefault(step, []).append(seconds)
        return found | timed

    def measure_steady(self, pieces: int) -> list[float]:
        """Seconds that the same work takes, over and over: what differs is the machine's noise."""
        times = []
        for piece in range(pieces):
            start = time.perf_counter()
            for index in range(VARIANTS):
                self._made.stir(piece * VARIANTS + index)
            times.append(time.perf_counter() - start)
        return times

    def open_storage(self, path: str, size_bytes: int) -> None:
        self.storage = StorageBench(path, size_bytes, self._probed.loops)

    def measure_overlap(self, specs: list[ReadSpec], rounds: int) -> Rates:
        assert self.storage is not None, "open_storage comes first"
        arena, executor = self._probed.arena, self._executors[0]
        slots = tokens.choose_slots(256, len(arena), VARIANTS)
        self._made.stir(0)
        numbers = itertools.cycle(range(VARIANTS))
        return self.storage.measure_overlap(
            specs, lambda: executor.add_neurons(0, arena, slots[next(numbers)]), rounds
        )

    def close(self) -> None:
        if self.storage is not None:
            self.storage.close()
        for executor in self._executors:
            executor.close()


MOST_ROUNDS, LEAST_ROUNDS = 5, 2
"""Bounds of the number of rounds."""
UNIT_ROUNDS = 3
"""Rounds over GPUs and NPUs; one where the rest took all the time there is."""
ROUNDS_S = 80.0
"""No round begins that would end later; the whole takes about two minutes."""
AGAIN_S = 15.0
"""Time beyond that in which figures are measured again that no two rounds agree about."""
USUAL_START_S = 15.0
"""Time to start where all kernels are compiled."""
STEADY_PIECES = 50
"""Times of equal work in a round."""
METER_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Everything that was found out.  Times in seconds, rates in bytes per second."""

    machine: Machine
    storage: Storage
    threads: int
    bandwidth: dict[int, list[float]] = field(default_factory=dict)
    """Read bandwidth of main memory by number of threads."""
    read_work: str = "compiled loop"
    step_s: Times = field(default_factory=dict)
    read_bytes_s: Rates = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)
    overlap: Rates = field(default_factory=dict)
    """Part of the shorter one of reading and computing that is saved where both go on at once."""
    steady_s: list[float] = field(default_factory=list)
    """Times of the same piece of work."""
    steady_work: str = "the same projections"
    """What that was."""
    accelerators: Accelerators = field(default_factory=Accelerators)
    """GPUs and NPUs."""


def measure_machine(place: Path, progress: Progress) -> Measurements:
    """Measure everything in rounds at ``place``, a folder or store: drift shows in the spread.
    UserError P340 without the cpu backend, P341 if nothing can be read."""
    machine = detect_machine()
    from pi2.backends.cpu import backend as cpu

    features = frozenset(machine.features)
    if obstacles := cpu.find_obstacles(features, machine.architecture):
        raise UserError.of(
            "P340",
            f"pi2's kernels cannot run here, so they cannot be measured: {'; '.join(obstacles)}",
            help="install the missing part: `pi2 doctor` names it",
        )
    threads = machine.cores
    recipe = KernelRecipe(threads=threads, features=features, architecture=machine.architecture)
    found = Measurements(machine=machine, storage=inspect_storage(place), threads=threads)
    begun = time.monotonic()
    with ExitStack() as stack:
        bench = stack.enter_context(Worker(recipe, progress))
        small = stack.enter_context(Worker(replace(recipe, sizes=SMALL), progress))
        path, size = stack.enter_context(open_sample(place))
        bench.call("open_storage", str(path), size)
        reads = list_reads(size, found.storage.direct.align_bytes or 512)
        start = time.monotonic()
        for number in range(MOST_ROUNDS):
            progress("rounds", number / MOST_ROUNDS)
            for count in sorted({1, threads // 2 or 1, threads}):
                # A new process each time: threads that slept may stay together on one core.
                with Worker(partial(BandwidthMeter, count, METER_BYTES)) as meter:
                    found.bandwidth.setdefault(count, []).append(max(meter.call("measure")))
            for worker in (bench, small):
                add_figures(found.step_s, worker.call("measure", 1))
            add_figures(found.read_bytes_s, bench.call("storage.measure", reads, 1))
            found.latency_s += bench.call("storage.measure_latency", 1)
            add_figures(found.overlap, bench.call("measure_overlap", list_overlaps(reads), 1))
            found.steady_s += bench.call("measure_steady", STEADY_PIECES)
            # Where kernels had to be compiled first, fewer rounds are left.
            limit_s = ROUNDS_S - max(start - begun - USUAL_START_S, 0.0)
            done, passed_s = number + 1, time.monotonic() - start
            if done >= LEAST_ROUNDS and passed_s * (done + 1) / done > limit_s:
                break
        while time.monotonic() - start <= limit_s + AGAIN_S:
            if not _measure_again(found, bench, small):
                break
        progress("rounds", 1.0)
        late = time.monotonic() - begun > USUAL_START_S + ROUNDS_S
    found.accelerators = measure_accelerators(progress, rounds=1 if late else UNIT_ROUNDS)
    return found


def _measure_again(found: Measurements, bench: Worker, small: Worker) -> bool:
    """Measure once more what no two rounds agree about; whether there was anything."""
    memory_bytes_s = max(rate for values in found.bandwidth.values() for rate in values)
    steps = {
        step
        for step, times in found.step_s.items()
        if not is_agreed(keep_possible(step, times, memory_bytes_s), "less")
    }
    for worker in (bench, small):
        add_figures(found.step_s, worker.call("measure", 1, steps))
    reads = [spec for spec, rates in found.read_bytes_s.items() if not is_agreed(rates, "more")]
    if reads:
        add_figures(found.read_bytes_s, bench.call("storage.measure", reads, 1))
    return bool(steps or reads)
