"""Times of the engine's steps: the cpu backend's kernels as the engine calls them.

A step is measured from Python and back, on models of `pi2.probing.model`, so that what a plan's
token takes is the sum of such times.  A 7B's weights are read from four layers in turn, more than
caches hold; a small model's stay in the caches, as they do where it runs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, cast

import numpy as np

from pi2.backends.experts import route
from pi2.backends.protocol import Backend, Executor
from pi2.memory.cache import NeuronCache
from pi2.plan.device import KernelName
from pi2.plan.layout import matrix_bytes
from pi2.plan.model import Moe
from pi2.probing import model as synthetic
from pi2.probing.engine import EngineSample
from pi2.probing.series import Key, Progress, collect_rounds
from pi2.probing.storage import ReadSpec, StorageBench

TOKENS = (8, 128)
EXPERTS = 8
VARIANTS = 16
ROUND_S = 0.15
"""Time that a kernel is called for in a round; the round's figure is the median call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step reads and computes; sent between processes."""

    kernel: KernelName
    size: int
    read_bytes: int | None
    operations: float | None
    width: int = synthetic.LARGE.width
    """Of the model."""

    @property
    def key(self) -> Key:
        """Its name among the measurements."""
        return (self.kernel, str(self.size), str(self.width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(StepFacts):
    """What is measured."""

    run: Callable[[int], float | None]
    """What is timed; it may say itself how many seconds count."""
    base: Callable[[int], float | None] | None = None
    """Its time is taken away: what the step adds to another one is measured."""
    stir: Callable[[int], None] | None = None
    """Runs before every call, untimed: it leaves the caches as other steps of a token do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecipe:
    """Makes a `KernelBench` in a process of its own: its 700 MB are nobody else's memory."""

    threads: int
    features: frozenset[str]
    architecture: str
    sizes: synthetic.ProbeShape = synthetic.LARGE

    def __call__(self, progress: Progress) -> KernelBench:
        return KernelBench(self, progress)


class KernelBench:
    """Kernels, weights and a neuron cache."""

    def __init__(self, recipe: KernelRecipe, progress: Progress) -> None:
        backend = cast(Backend, import_module("pi2.backends.cpu"))
        self._sizes = recipe.sizes
        self._model = synthetic.make_model(recipe.sizes)
        request = synthetic.make_request(
            self._model,
            threads=recipe.threads,
            features=recipe.features,
            architecture=recipe.architecture,
            progress=progress,
        )
        self._executor: Executor = backend.build(request)
        self._arena = synthetic.make_arena(self._model, recipe.sizes.arena_neurons)
        self._used_bytes = request.bundle.used_bytes
        self._many = np.arange(synthetic.CHUNK, dtype=np.int32)
        self._one = self._many[:1]
        self._steps = self._list_steps()
        self._storage: StorageBench | None = None

    def list_steps(self) -> list[StepFacts]:
        """What is measured."""
        return [
            StepFacts(
                kernel=step.kernel,
                size=step.size,
                read_bytes=step.read_bytes,
                operations=step.operations,
                width=step.width,
            )
            for step in self._steps
        ]

    def measure(self, rounds: int) -> dict[Key, list[float]]:
        """Seconds per call of each step, ``rounds`` medians."""
        measures = [(step.key, _make_timer(step)) for step in self._steps]
        return collect_rounds(measures, rounds, lambda label, share: None, "")

    def measure_steady(self, pieces: int) -> list[float]:
        """Seconds that the same work takes, over and over: what differs is the machine's noise."""
        step = next(item for item in self._steps if item.kernel == "project")
        times = []
        for piece in range(pieces):
            start = time.perf_counter()
            for index in range(VARIANTS):
                step.run(piece * VARIANTS + index)
            times.append(time.perf_counter() - start)
        return times

    def open_storage(self, path: str, size_bytes: int) -> None:
        """Take the file for the reads that `measure_reads` times."""
        self._storage = StorageBench(path, size_bytes, self._executor.read_runs)

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
        self._stir(0)
        numbers = itertools.cycle(range(VARIANTS))
        return self._storage.measure_overlap(
            specs,
            lambda: self._executor.add_neurons(0, self._arena, slots[next(numbers)]),
            rounds,
        )

    def close(self) -> None:
        """Give everything back."""
        if self._storage is not None:
            self._storage.close()
        self._executor.close()

    def _list_steps(self) -> list[Step]:
        model, executor, layers = self._model, self._executor, self._sizes.layers
        shape, precision = model.shape, model.quantization
        query = shape.heads * shape.head_dim
        qkv = query + 2 * shape.kv_heads * shape.head_dim
        attention = matrix_bytes(qkv, shape.stored_hidden, precision.attention)
        attention += matrix_bytes(shape.stored_hidden, shape.stored_query, precision.attention)
        weights = qkv * shape.stored_hidden + shape.stored_hidden * shape.stored_query
        predictor = matrix_bytes(self._sizes.rank, shape.stored_hidden, precision.predictor)
        predictor += matrix_bytes(shape.ffn, self._sizes.rank, precision.predictor)

        def attend(position: int, tokens: Any) -> Callable[[int], None]:
            def run(index: int) -> None:
                if index == 0:
                    executor.embed(tokens)
                executor.attend(index % layers, position)

            return run

        def norm(index: int) -> None:
            executor.begin_ffn(index % layers)
            executor.end_ffn(index % layers)

        def multiply(index: int) -> None:
            executor.logits(0)

        def predict(index: int) -> None:
            executor.predict_low_rank(index % layers, 0.0)

        steps = [
            Step(
                kernel="multiply",
                size=shape.vocab,
                read_bytes=matrix_bytes(shape.vocab, shape.stored_hidden, precision.head),
                operations=None,
                run=multiply,
                stir=self._stir,
            ),
            Step(
                kernel="project",
                size=qkv + shape.stored_hidden,
                read_bytes=attention,
                operations=None,
                run=attend(0, self._one),
            ),
            Step(
                kernel="norm",
                size=shape.stored_hidden,
                read_bytes=None,
                operations=None,
                run=norm,
                stir=self._stir,
            ),
            Step(
                kernel="predict",
                size=shape.ffn,
                read_bytes=predictor,
                operations=None,
                run=predict,
                stir=self._stir,
            ),
            *(
                Step(
                    kernel="project-many",
                    size=tokens,
                    read_bytes=None,
                    operations=2.0 * tokens * weights,
                    run=attend(0, self._many[:tokens]),
                )
                for tokens in TOKENS
            ),
            Step(
                kernel="attend",
                size=self._sizes.context,
                read_bytes=2 * 2 * self._sizes.context * shape.kv_heads * shape.head_dim,
                operations=None,
                run=attend(self._sizes.context, self._one),
                base=attend(0, self._one),
            ),
            self._route(),
        ]
        steps += [self._gather(count) for count in self._sizes.gathered]
        steps += [self._dense(tokens) for tokens in TOKENS]
        steps += [self._look_up(missing) for missing in self._sizes.missing]
        steps += [self._find_slots(), *self._run_engine()]
        return [replace(step, width=self._sizes.width) for step in steps]

    def _stir(self, index: int) -> None:
        """Read a layer's projections, and make the FFN's input anew: all ones."""
        executor = self._executor
        executor.embed(self._one)
        executor.attend(index % self._sizes.layers, 0)
        executor.embed(self._one)
        executor.begin_ffn(0)

    def _gather(self, count: int) -> Step:
        executor, arena = self._executor, self._arena
        slots = synthetic.choose_slots(count, self._sizes.arena_neurons, VARIANTS)

        def run(index: int) -> None:
            executor.add_neurons(0, arena, slots[index % VARIANTS])

        self._stir(0)
        executor.count_active()
        run(0)
        assert executor.count_active() >= 0.99 * count, "most neurons fire"
        return Step(
            kernel="gather",
            size=count,
            read_bytes=count * self._used_bytes,
            operations=None,
            run=run,
            stir=self._stir,
        )

    def _dense(self, tokens: int) -> Step:
        executor, chunk = self._executor, self._many[:tokens]
        neurons = self._sizes.dense_neurons
        pieces = [
            self._arena[start : start + neurons] for start in range(0, VARIANTS * neurons, neurons)
        ]

        def run(index: int) -> None:
            if index == 0:
                executor.embed(chunk)
                executor.begin_ffn(0)
            executor.add_dense(0, pieces[index % VARIANTS])

        operations = 2.0 * 3 * neurons * self._model.shape.stored_hidden * tokens
        size = neurons * self._used_bytes
        return Step(kernel="dense", size=tokens, read_bytes=size, operations=operations, run=run)

    def _look_up(self, missing: int) -> Step:
        """Neurons that were predicted, ``missing`` of which are not in memory."""
        neurons, first = self._sizes.neurons, self._sizes.neurons * 2 // 7
        arena = np.zeros((2 * first, 64), np.uint8)
        cache = NeuronCache(arena, [first], neurons, policy="lfu")
        hot = np.linspace(0, first - 1, self._sizes.named - missing).astype(np.int32)
        random = np.random.default_rng(2)
        cold = [
            np.sort(random.choice(np.arange(first, neurons), missing, replace=False))
            for _ in range(4 * VARIANTS)
        ]
        wanted = [np.concatenate([hot, item]).astype(np.int32) for item in cold]

        def run(index: int) -> None:
            found = cache.look_up(0, wanted[index % len(wanted)])
            cache.hold(found.resident_slots)
            cache.hold(found.missing_slots)
            cache.release(found.resident_slots)
            cache.release(found.missing_slots)

        return Step(
            kernel="look-up",
            size=missing,
            read_bytes=None,
            operations=None,
            run=run,
            stir=self._stir,
        )

    def _find_slots(self) -> Step:
        """Which neurons have the slots that are computed with: half of them hot ones."""
        neurons = self._sizes.neurons
        cache = NeuronCache(np.zeros((neurons, 64), np.uint8), [neurons // 2], neurons)
        for _ in cache.fill():
            pass
        slots = np.linspace(0, neurons - 1, self._sizes.named).astype(np.int32)

        def run(index: int) -> None:
            cache.find_indices(0, slots)

        return Step(
            kernel="find",
            size=self._sizes.named,
            read_bytes=None,
            operations=None,
            run=run,
            stir=self._stir,
        )

    def _route(self) -> Step:
        """Choosing two of eight experts."""
        moe = Moe(experts=EXPERTS, active_experts=2)
        random = np.random.default_rng(4)
        router = random.standard_normal((EXPERTS, self._sizes.width)).astype(np.float32)
        inputs = np.ones((1, self._sizes.width), np.float32)

        def run(index: int) -> None:
            route(moe, inputs, router)

        return Step(
            kernel="route",
            size=EXPERTS,
            read_bytes=None,
            operations=None,
            run=run,
            stir=self._stir,
        )

    def _run_engine(self) -> list[Step]:
        """The engine's own part of a token, everything being in memory."""
        hot = EngineSample(self._executor, self._arena, self._model, hot=1.0)
        cached = [
            EngineSample(self._executor, self._arena, self._model, hot=hot) for hot in (0.95, 0.5)
        ]

        def time_with(sample: EngineSample) -> Callable[[int], float]:
            return lambda index: sample.time_layer()

        def begin(index: int) -> None:
            self._executor.embed(self._one)
            self._executor.count_active()

        facts: dict[str, Any] = {"read_bytes": None, "operations": None}
        return [
            Step(
                kernel="engine",
                size=self._sizes.layers,
                run=time_with(hot),
                **facts,
            ),
            *(
                Step(
                    kernel="engine-cached",
                    size=sample.cached,
                    run=time_with(sample),
                    **facts,
                )
                for sample in cached
            ),
            Step(
                kernel="engine-token",
                size=self._sizes.layers,
                run=begin,
                stir=self._stir,
                **facts,
            ),
        ]


def _make_timer(step: Step) -> Callable[[], float]:
    def measure() -> float:
        taken = _time_calls(step.run, step.stir)
        return taken if step.base is None else max(taken - _time_calls(step.base), 1e-9)

    return measure


def _time_calls(
    run: Callable[[int], float | None], stir: Callable[[int], None] | None = None
) -> float:
    """Median seconds of a call; the first ones make ready and do not count."""
    for index in range(2):
        if stir is not None:
            stir(index)
        run(index)
    times: list[float] = []
    end = time.perf_counter() + ROUND_S
    index = 2
    while len(times) < 5 or time.perf_counter() < end:
        if stir is not None:
            stir(index)
        start = time.perf_counter()
        own_s = run(index)
        times.append(time.perf_counter() - start if own_s is None else own_s)
        index += 1
    return statistics.median(times)
