"""Times of the engine's steps: the cpu backend's kernels as the engine calls them.

Steps of a generated token are measured within tokens of the models of `pi2.probing.model`, so that
what a plan's token takes is the sum of such times; the others, one by one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from pi2.backends.cpu.specification import make_spec
from pi2.backends.host import load_host_loops
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import Executor
from pi2.machine import bind_calling_thread, list_allowed_cores
from pi2.plan.documents.backends import find_executor_backend
from pi2.probing import model as synthetic
from pi2.probing.series import Key, collect_rounds
from pi2.probing.steps import VARIANTS, Steps
from pi2.probing.storage import ReadSpec, StorageBench
from pi2.probing.timing import StepFacts, make_timer
from pi2.probing.token_steps import EXACT, GATES, USUAL, TokenSteps, Variety
from pi2.progress import Progress, ignore_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecipe:
    """Makes a `KernelBench` in a process of its own: its 700 MB are nobody else's memory."""

    threads: int
    features: frozenset[str]
    architecture: str
    sizes: synthetic.ProbeShape = synthetic.LARGE
    varieties: tuple[Variety, ...] = (USUAL, GATES, EXACT)

    def __call__(self, progress: Progress) -> KernelBench:
        return KernelBench(self, progress)

    def list_specs(self) -> list[KernelSpec]:
        """What its kernels are compiled from."""
        request = synthetic.make_request(
            synthetic.make_model(self.sizes),
            threads=self.threads,
            features=self.features,
            architecture=self.architecture,
            progress=ignore_progress,
            filled=False,
        )
        return [make_spec(variety.choose_types(request)) for variety in self.varieties]


class KernelBench:
    """Kernels, weights and a neuron cache."""

    def __init__(self, recipe: KernelRecipe, progress: Progress) -> None:
        backend = find_executor_backend("cpu")
        assert backend is not None, "the CPU's backend computes models"
        self._sizes = recipe.sizes
        self._free = list_allowed_cores()
        cores = tuple(self._free) if len(self._free) == recipe.threads else ()
        model = synthetic.make_model(recipe.sizes)
        request = synthetic.make_request(
            model,
            threads=recipe.threads,
            features=recipe.features,
            architecture=recipe.architecture,
            progress=progress,
        )
        # Each thread has a core of its own: else the system puts two on one where others work.
        request = replace(request, cores=cores)
        self._bound = cores[:1]
        self._executor: Executor = backend.build(request)
        self._loops = load_host_loops(progress, frozenset(recipe.features))
        used_bytes = request.bundle.used_bytes
        self._made = Steps(self._executor, self._loops, model, recipe.sizes, used_bytes=used_bytes)
        self._steps = self._made.list_all()
        layers = min(recipe.sizes.layers, recipe.sizes.arena_neurons // recipe.sizes.neurons)
        self._others: list[Executor] = []
        self._tokens = []
        for variety in recipe.varieties:
            executor = self._executor
            if variety != USUAL:
                executor = backend.build(variety.apply(request, layers))
                self._others.append(executor)
            self._tokens.append(
                TokenSteps(
                    executor,
                    self._made.arena,
                    model,
                    recipe.sizes,
                    variety,
                    used_bytes=used_bytes,
                    loops=self._loops,
                )
            )
        self._storage: StorageBench | None = None

    def list_steps(self) -> list[StepFacts]:
        """What is measured."""
        listed = [facts for item in self._tokens for facts in item.list_facts()]
        return listed + [
            StepFacts(
                kernel=step.kernel,
                size=step.size,
                read_bytes=step.read_bytes,
                operations=step.operations,
                width=step.width,
            )
            for step in self._steps
        ]

    def measure(self, rounds: int, keys: Collection[Key] | None = None) -> dict[Key, list[float]]:
        """Seconds per call of each step, ``rounds`` figures of each; of ``keys`` alone, and what is
        measured together with them, if they are given."""
        if self._bound:
            bind_calling_thread(self._bound)
        try:
            return self._measure(rounds, keys)
        finally:
            if self._bound:
                # Threads that read would be bound with it.
                bind_calling_thread(self._free)

    def _measure(self, rounds: int, keys: Collection[Key] | None) -> dict[Key, list[float]]:
        wanted = [step for step in self._steps if keys is None or step.key in keys]
        measures = [(step.key, make_timer(step)) for step in wanted]
        found = collect_rounds(measures, rounds, ignore_progress, "")
        for _ in range(rounds):
            for item in self._tokens:
                own = {facts.key for facts in item.list_facts()}
                if keys is not None and own.isdisjoint(keys):
                    continue
                for key, seconds in item.measure().items():
                    found.setdefault(key, []).append(seconds)
        return found

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
        """Take the file for the reads that `measure_reads` times."""
        self._storage = StorageBench(path, size_bytes, self._loops)

    def measure_reads(self, specs: list[ReadSpec], rounds: int) -> dict[Key, list[float]]:
        """Bytes per second of each kind of reads, ``rounds`` times."""
        assert self._storage is not None, "open_storage comes first"
        return self._storage.measure(specs, rounds)

    def measure_latency(self, rounds: int) -> list[float]:
        """Seconds of one small read in an idle queue."""
        assert self._storage is not None, "open_storage comes first"
        return self._storage.measure_latency(rounds)

    def measure_overlap(self, specs: list[ReadSpec], rounds: int) -> dict[Key, list[float]]:
        """Part of reading that computing hides, and the other way round."""
        assert self._storage is not None, "open_storage comes first"
        slots = synthetic.choose_slots(256, self._sizes.arena_neurons, VARIANTS)
        self._made.stir(0)
        numbers = itertools.cycle(range(VARIANTS))
        return self._storage.measure_overlap(
            specs,
            lambda: self._executor.add_neurons(0, self._made.arena, slots[next(numbers)]),
            rounds,
        )

    def close(self) -> None:
        """Release everything."""
        if self._storage is not None:
            self._storage.close()
        for executor in (self._executor, *self._others):
            executor.close()
