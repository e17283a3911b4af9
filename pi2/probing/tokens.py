"""Times of the engine's steps within tokens: whole ones of the probe's model, all in memory.

A step that is called again and again finds its weights in the caches nearest to the processor, and
its threads awake.  In a token all steps take turns, and others have been there since: so tokens go
through `pi2.engine.forward`, and every call of the executor is timed.  What is left of a token is
the engine's own part, which is Python.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy as np

from pi2.arrays import I32, U8
from pi2.backends.host import HostLoops
from pi2.backends.protocol import Executor
from pi2.engine.feed_forward import FeedForward
from pi2.engine.forward import Forward
from pi2.memory.cache import NeuronCache
from pi2.memory.null_reader import NullReader
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_running import Decode

NAMED = 0.14
"""Share of the neurons that a predictor names, about."""
_RECORDED = frozenset(
    {
        "embed",
        "attend",
        "begin_ffn",
        "predict_low_rank",
        "predict_gate",
        "add_neurons",
        "end_ffn",
        "logits",
        "count_active",
    }
)
_LEAST_TOKENS = 8
_KEPT = 0.95
"""Share of the times that counts: the longest are due to other work on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """What a token of a series does, beside what all tokens do."""

    position: int
    """Tokens in the context."""
    named: int
    """Neurons of a layer that are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """Seconds of calls by their name and the token's work, and of the engine in a layer."""

    calls: dict[tuple[str, TokenWork], float]
    python_s: float

    def average(self, name: str, *, position: int | None = None, named: int | None = None) -> float:
        """Mean seconds of a call in all tokens, or in those at this position or with so many
        neurons."""
        return statistics.fmean(
            seconds
            for (call, work), seconds in self.calls.items()
            if call == name and position in (None, work.position) and named in (None, work.named)
        )


class TokenSample:
    """An engine whose tokens are timed call by call."""

    def __init__(
        self,
        executor: Executor,
        arena: U8,
        model: Model,
        *,
        predictor: Literal["low-rank", "gate"],
        works: Sequence[TokenWork],
        hot: float = 1.0,
        loops: HostLoops | None = None,
    ) -> None:
        """``arena`` [n, stride]: neurons, of as many of the model's layers as it has room for;
        ``hot``: share of them that always stays, while a cache holds the others;
        ``loops``: the cache's, numpy without."""
        shape = model.shape
        layers = min(shape.layers, len(arena) // shape.ffn)
        stay = round(hot * shape.ffn)
        cache = NeuronCache(arena[: layers * shape.ffn], [stay] * layers, shape.ffn, policy="lfu")
        cache.loops = loops
        for _ in cache.fill():
            pass
        recorder = _RecordingExecutor(executor)
        cache.find_indices = recorder.time_with("find", cache.find_indices)  # type: ignore[method-assign]
        feed_forward = FeedForward(
            recorder,
            cache,
            NullReader(arena.shape[1]),
            arena[:2].reshape(2, 1, -1),
            layers=layers,
            decode=Decode(predictor=predictor),
        )
        context = max(work.position for work in works) + 1
        self._forward = Forward(recorder, feed_forward, layers=layers, chunk=1, context=context)
        self._recorder, self._layers, self._vocab = recorder, layers, shape.vocab
        self._works = list(works)
        self._named = {count: _draw_neurons(shape.ffn, count) for count in {w.named for w in works}}
        self._stay = stay
        self._overhead_s = _time_recording()

    def count_cached(self, named: int) -> int:
        """Neurons of a layer that come from the cache where so many are named."""
        counts = [np.count_nonzero(item >= self._stay) for item in self._named[named]]
        return round(float(np.mean(counts)))

    def measure(self, seconds: float) -> TokenTimes:
        """Times of tokens for so long, each work in turn."""
        calls: dict[tuple[str, TokenWork], list[float]] = defaultdict(list)
        python: list[float] = []
        end, number = time.perf_counter() + seconds, 0
        least = _LEAST_TOKENS + len(self._works)
        while number < least or number % len(self._works) or time.perf_counter() < end:
            work = self._works[number % len(self._works)]
            total_s = self._run(work, number)
            if number >= len(self._works):  # the first ones make ready
                for name, taken_s in self._recorder.calls:
                    calls[name, work].append(taken_s)
                busy_s = self._recorder.busy_s + len(self._recorder.calls) * self._overhead_s
                python.append(max(total_s - busy_s, 0.0) / self._layers)
            number += 1
        return TokenTimes(
            calls={key: average_most(values) for key, values in calls.items()},
            python_s=average_most(python),
        )

    def _run(self, work: TokenWork, number: int) -> float:
        forward, recorder = self._forward, self._recorder
        forward.reset()
        forward.positions[0] = work.position
        recorder.begin(self._named[work.named])
        start = time.perf_counter()
        forward.decode(number % self._vocab)
        return time.perf_counter() - start


class _RecordingExecutor:
    """Stands for an executor, notes how long its calls take, and has predictors name what is
    wanted."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._token = np.zeros(1, np.int32)
        self._named = cycle([self._token])
        self.calls: list[tuple[str, float]] = []
        self.busy_s = 0.0
        """Seconds in all calls, including those that only the measurement makes."""

    def begin(self, named: Sequence[I32]) -> None:
        """Begin a token, whose layers compute ``named`` in turn."""
        self.calls = []
        self.busy_s = 0.0
        self._named = cycle(named)

    def begin_ffn(self, layer: int) -> None:
        """Begin the FFN, with an input with which all neurons fire."""
        start = time.perf_counter()
        self._executor.embed(self._token)
        self.busy_s += time.perf_counter() - start
        self._time("begin_ffn", self._executor.begin_ffn, layer)

    def predict_low_rank(self, *arguments: Any) -> I32:
        """Let the predictor run, and name other neurons."""
        self._time("predict_low_rank", self._executor.predict_low_rank, *arguments)
        return next(self._named)

    def predict_gate(self, *arguments: Any) -> I32:
        """Let gates be computed, and name other neurons."""
        self._time("predict_gate", self._executor.predict_gate, *arguments)
        return next(self._named)

    def _time(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = method(*arguments)
        taken_s = time.perf_counter() - start
        self.calls.append((name, taken_s))
        self.busy_s += taken_s
        return result

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._executor, name)
        if name in _RECORDED:
            method = self.time_with(name, method)
            self.__dict__[name] = method  # the next look-up does not come here
        return method

    def time_with(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method`` with its calls timed."""
        return lambda *arguments: self._time(name, method, *arguments)


def average_most(values: Sequence[float]) -> float:
    """Mean without the longest of many times."""
    return statistics.fmean(sorted(values)[: max(1, round(len(values) * _KEPT))])


def _draw_neurons(among: int, count: int) -> list[I32]:
    """Some choices of ``count`` neurons of a layer, ascending."""
    random = np.random.default_rng(5)
    return [np.sort(random.choice(among, count, replace=False)).astype(np.int32) for _ in range(16)]


def _time_recording() -> float:
    """Seconds that a recorded call takes beyond what is noted: the least of some trials, since
    others' work only adds to it."""
    trials = []
    for _ in range(20):
        recorder = _RecordingExecutor(_Nothing())  # type: ignore[arg-type]
        start = time.perf_counter()
        for _ in range(20):
            recorder.embed(None)
        trials.append((time.perf_counter() - start - recorder.busy_s) / 20)
    return max(min(trials), 0.0)


class _Nothing:
    def embed(self, token: None) -> None:
        """Do nothing."""
