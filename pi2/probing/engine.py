"""What the engine itself takes of a token: Python between the executor's steps.

A token of the probe's model goes through `pi2.engine.forward`, all neurons being in memory; what
the executor's methods take is taken away.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import Executor
from pi2.engine.feed_forward import FeedForward
from pi2.engine.forward import Forward
from pi2.memory.cache import NeuronCache
from pi2.memory.null_reader import NullReader
from pi2.plan.model import Model

NAMED = 0.14
"""Share of the neurons that is computed: about what predictors name."""


class EngineSample:
    """An engine with an executor, whose methods are timed."""

    def __init__(
        self, executor: Executor, arena: npt.NDArray[np.uint8], model: Model, *, hot: float
    ) -> None:
        """``arena`` [n, stride]: neurons, of as many of the model's layers as it has room for;
        ``hot``: share of them that always stays, while a cache holds the others."""
        shape = model.shape
        random = np.random.default_rng(5)
        named = random.choice(shape.ffn, round(NAMED * shape.ffn), replace=False)
        timed = _TimedExecutor(executor, np.sort(named).astype(np.int32))
        layers = min(shape.layers, len(arena) // shape.ffn)
        stay = round(hot * shape.ffn)
        room = arena[: layers * shape.ffn]
        cache = NeuronCache(room, [stay] * layers, shape.ffn, policy="lfu")
        for _ in cache.fill():
            pass
        self.cached = int(np.count_nonzero(named >= stay))
        """Neurons of a layer that a token takes from the cache."""
        feed_forward = FeedForward(
            timed,
            cache,
            NullReader(arena.shape[1]),
            arena[:2].reshape(2, 1, -1),
            layers=layers,
            predictor="low-rank",
            threshold=0.0,
            look_ahead="none",
        )
        self._layers = layers
        self._forward = Forward(
            timed, feed_forward, layers=layers, chunk=1, context=shape.context // 2
        )
        self._timed = timed
        self._token, self._vocab = 0, shape.vocab

    def time_layer(self) -> float:
        """Seconds of a token outside the executor, for each layer."""
        self._forward.reset()
        self._token = (self._token + 1) % self._vocab
        self._timed.seconds = 0.0
        start = time.perf_counter()
        self._forward.decode(self._token)
        return (time.perf_counter() - start - self._timed.seconds) / self._layers


class _TimedExecutor:
    """Stands for an executor and adds up the time in its methods."""

    def __init__(self, executor: Executor, named: npt.NDArray[np.int32]) -> None:
        """``named``: what predictors shall name, whatever they do."""
        self._executor = executor
        self._named = named
        self.seconds = 0.0

    def predict_low_rank(self, *arguments: Any) -> npt.NDArray[np.int32]:
        """Let the predictor run, and name other neurons."""
        start = time.perf_counter()
        self._executor.predict_low_rank(*arguments)
        self.seconds += time.perf_counter() - start
        return self._named

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._executor, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        self.__dict__[name] = timed
        return timed
