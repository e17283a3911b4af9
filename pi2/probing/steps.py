"""Steps that are measured one by one: those of prompts, and what tokens do not show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pi2.backends.experts import route
from pi2.backends.host import HostLoops
from pi2.backends.protocol import Executor
from pi2.memory.cache import NeuronCache
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_experts import Moe
from pi2.probing import model as synthetic
from pi2.probing.timing import Step

TOKENS = (8, 128)
EXPERTS = 8
REST_US = 2000
"""Microseconds without work after which threads sleep."""
VARIANTS = 16
"""Number of inputs that calls take in turn."""


class Steps:
    """Steps of a model that ``executor`` runs, with neurons in ``arena``."""

    def __init__(
        self,
        executor: Executor,
        loops: HostLoops,
        model: Model,
        sizes: synthetic.ProbeShape,
        *,
        used_bytes: int,
    ) -> None:
        """``loops``: the neuron cache's; ``used_bytes``: of a bundle, without what fills it up."""
        self._executor = executor
        self._loops = loops
        self._model = model
        self._sizes = sizes
        self.arena = synthetic.make_arena(model, sizes.arena_neurons)
        self._used_bytes = used_bytes
        self._many = np.arange(synthetic.CHUNK, dtype=np.int32)
        self._one = self._many[:1]

    def list_all(self) -> list[Step]:
        """Every step, in the order in which they are measured."""
        steps = [
            *(self._project(tokens) for tokens in TOKENS),
            self._route(),
            *(self._dense(tokens) for tokens in TOKENS),
            *(self._look_up(missing) for missing in self._sizes.missing),
            self._wake(),
        ]
        return [replace(step, width=self._sizes.width) for step in steps]

    def _project(self, tokens: int) -> Step:
        """A layer's attention for some tokens of a prompt."""
        executor, layers, shape = self._executor, self._sizes.layers, self._model.shape
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        weights = qkv * shape.stored_hidden + shape.stored_hidden * shape.stored_query

        def run(index: int) -> None:
            if index == 0:
                executor.embed(self._many[:tokens])
            executor.attend(index % layers, 0)

        return Step(
            kernel="project-many",
            size=tokens,
            read_bytes=None,
            operations=2.0 * tokens * weights,
            run=run,
        )

    def stir(self, index: int) -> None:
        """Read a layer's projections, and make the FFN's input anew: all ones."""
        executor = self._executor
        executor.embed(self._one)
        executor.attend(index % self._sizes.layers, 0)
        executor.embed(self._one)
        executor.begin_ffn(0)

    def _wake(self) -> Step:
        """What a call takes more where threads had nothing to do before it."""
        executor, count = self._executor, self._sizes.gathered[0]
        slots = synthetic.choose_slots(count, self._sizes.arena_neurons, VARIANTS)

        self.stir(0)

        def compute(index: int) -> float:
            start = time.perf_counter()
            executor.add_neurons(0, self.arena, slots[index % VARIANTS])
            return time.perf_counter() - start

        def rest(index: int) -> float:
            time.sleep(REST_US / 1e6)
            return compute(index)

        return Step(
            kernel="wake",
            size=REST_US,
            read_bytes=None,
            operations=None,
            run=rest,
            base=compute,
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

        operations = 2.0 * 3 * neurons * self._model.stored_neuron_width * tokens
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
        cache.loops = self._loops
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

    def _route(self) -> Step:
        """Choosing two of eight experts."""
        moe = Moe(experts=EXPERTS, active_experts=2)
        random = np.random.default_rng(4)
        router = random.standard_normal((EXPERTS, self._sizes.width)).astype(np.float32)
        inputs = np.ones((1, self._sizes.width), np.float32)

        def run(index: int) -> None:
            route(moe, inputs @ router.T)

        return Step(
            kernel="route",
            size=EXPERTS,
            read_bytes=None,
            operations=None,
            run=run,
            stir=self.stir,
        )
