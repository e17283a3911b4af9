"""Which steps are measured: the cpu backend's kernels, the cache and the engine's own part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pi2.backends.experts import route
from pi2.backends.protocol import Executor
from pi2.memory.cache import NeuronCache
from pi2.plan.layout import matrix_bytes
from pi2.plan.model import Model, Moe
from pi2.probing import model as synthetic
from pi2.probing.engine import EngineSample
from pi2.probing.timing import Step

TOKENS = (8, 128)
EXPERTS = 8
VARIANTS = 16
"""Inputs that calls take in turn."""


class Steps:
    """Steps of a model that ``executor`` runs, with neurons in ``arena``."""

    def __init__(
        self, executor: Executor, model: Model, sizes: synthetic.ProbeShape, *, used_bytes: int
    ) -> None:
        """``used_bytes``: of a bundle, without what fills it up."""
        self._executor = executor
        self._model = model
        self._sizes = sizes
        self.arena = synthetic.make_arena(model, sizes.arena_neurons)
        self._used_bytes = used_bytes
        self._many = np.arange(synthetic.CHUNK, dtype=np.int32)
        self._one = self._many[:1]

    def list_all(self) -> list[Step]:
        """Every step, in the order in which they are measured."""
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
                stir=self.stir,
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
                stir=self.stir,
            ),
            Step(
                kernel="predict",
                size=shape.ffn,
                read_bytes=predictor,
                operations=None,
                run=predict,
                stir=self.stir,
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

    def stir(self, index: int) -> None:
        """Read a layer's projections, and make the FFN's input anew: all ones."""
        executor = self._executor
        executor.embed(self._one)
        executor.attend(index % self._sizes.layers, 0)
        executor.embed(self._one)
        executor.begin_ffn(0)

    def _gather(self, count: int) -> Step:
        executor, arena = self._executor, self.arena
        slots = synthetic.choose_slots(count, self._sizes.arena_neurons, VARIANTS)

        def run(index: int) -> None:
            executor.add_neurons(0, arena, slots[index % VARIANTS])

        self.stir(0)
        executor.count_active()
        run(0)
        assert executor.count_active() >= 0.99 * count, "most neurons fire"
        return Step(
            kernel="gather",
            size=count,
            read_bytes=count * self._used_bytes,
            operations=None,
            run=run,
            stir=self.stir,
        )

    def _dense(self, tokens: int) -> Step:
        executor, chunk = self._executor, self._many[:tokens]
        neurons = self._sizes.dense_neurons
        pieces = [
            self.arena[start : start + neurons] for start in range(0, VARIANTS * neurons, neurons)
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
        """Neurons that were predicted; what ``missing`` ones that are not in memory add."""
        return Step(
            kernel="look-up",
            size=missing,
            read_bytes=None,
            operations=None,
            run=self._make_look_up(missing),
            base=self._make_look_up(0) if missing else None,
            stir=self.stir,
        )

    def _make_look_up(self, missing: int) -> Callable[[int], None]:
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
            cache.hold(found)
            cache.release(found)

        return run

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
            stir=self.stir,
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
            stir=self.stir,
        )

    def _run_engine(self) -> list[Step]:
        """The engine's own part of a token, everything being in memory."""
        hot = EngineSample(self._executor, self.arena, self._model, hot=1.0)
        cached = [
            EngineSample(self._executor, self.arena, self._model, hot=hot) for hot in (0.95, 0.5)
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
                stir=self.stir,
                **facts,
            ),
        ]
