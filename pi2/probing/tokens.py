"""Times the engine's steps within whole tokens, whose other steps evict their weights."""

import mmap
import statistics
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from pi2.arrays import F16, I32, U8, Raw, Scales
from pi2.backends.executor import Executor
from pi2.backends.host import HostLoops
from pi2.backends.protocol import BuildRequest
from pi2.engine.feed_forward import FeedForward
from pi2.engine.layer_model import LayerModel
from pi2.engine.sequences import Sequences
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import count_reads
from pi2.model.tensor import EMBEDDING, DenseTensor
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Attention
from pi2.plan.documents.model_parts import Ffn, Precision, Predictor, Quantization, Shape
from pi2.plan.documents.plan import Decode
from pi2.plan.weights.layout import Tensor, scale_bytes, weight_bytes
from pi2.progress import Progress

CHUNK = 128
_PATTERN_BYTES = 1 << 22
_PAGE_BYTES = 4096
_LOW_NIBBLES = 0x77
"""Mask that clears the highest bit of every four: all weights are below zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeShape:
    """Sizes of a model that kernels are measured with, and their arguments."""

    width: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rank: int
    """Rank of the predictors."""
    predictor: Precision
    layers: int
    context: int
    """Tokens that attention is measured with, in addition to none."""
    arena_neurons: int
    """Number of neurons in memory."""
    gathered: tuple[int, ...]
    """Numbers of neurons of a call."""
    dense_neurons: int
    """Neurons of a call for many tokens."""
    named: int
    """Neurons that are looked for in the cache."""
    missing: tuple[int, ...]
    """Numbers of those neurons that are not in memory."""


_TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
_SHAPES = {
    name: ProbeShape(**sizes | {key: tuple(sizes[key]) for key in ("gathered", "missing")})
    for name, sizes in _TABLES.items()
}
LARGE, SMALL, REMOTE = (_SHAPES[name] for name in ("large", "small", "remote"))


def make_model(sizes: ProbeShape = LARGE) -> Model:
    return Model(
        schema_version=2,
        id="probe",
        shape=Shape(
            layers=sizes.layers,
            hidden=sizes.width,
            ffn=sizes.neurons,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab=sizes.vocab,
            context=2 * sizes.context,
        ),
        attention=Attention(),
        ffn=Ffn(activation="drelu"),
        quantization=Quantization(predictor=sizes.predictor),
        predictor=Predictor(rank=sizes.rank),
    )


def allocate(segment: str, size: int, *, huge: bool = False) -> U8:
    """Zeroed bytes, page-aligned, in huge pages only if asked for, as in a run."""
    room = mmap.mmap(-1, max(size, 1))
    if sys.platform == "linux":
        room.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    found = np.frombuffer(room, np.uint8, count=size)
    # What was never written is one page of zeros, which would stay in the nearest cache.
    found[::_PAGE_BYTES] = 0
    if segment == "kv":
        # Numbers: zeros take less time. 0.06 to 0.08 as fp16, small ones as fp32, any as int8.
        found[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        found[1::2] = 0x2C
    return found


def make_request(
    model: Model,
    *,
    threads: int,
    features: frozenset[str],
    architecture: str,
    progress: Progress,
    filled: bool = True,
) -> BuildRequest:
    """A backend's request for the model, with random weights if ``filled``."""
    assert model.predictor is not None
    shape = model.shape
    ranks = [model.predictor.rank] * shape.layers
    return BuildRequest(
        model=model,
        tensors={
            item.name: _make_tensor(item) if filled else _wrap(item, np.zeros(0, np.uint8), None)
            for item in list_tensors(model, ranks)
        },
        bundle=model.lay_out_bundle(),
        neurons=shape.ffn,
        chunk=CHUNK,
        context=shape.context // 2 + 64,
        gate_rows=None,
        threads=threads,
        features=features,
        architecture=architecture,
        allocate=allocate,
        progress=progress,
    )


def make_arena(model: Model, neurons: int) -> U8:
    """Neurons [n, stride] that all fire for an input of ones: weights and scales are negative."""
    layout = model.lay_out_bundle()
    arena = fill(neurons * layout.stride, _LOW_NIBBLES).reshape(-1, layout.stride)
    size = scale_bytes(layout.hidden, layout.precision)
    scales = np.full(size // 2, -0.01, np.float16).view(np.uint8)
    for part in layout.parts:
        arena[:, part.scales_offset : part.scales_offset + size] = scales
    return arena


def make_gate_rows(model: Model, layers: int) -> list[tuple[U8, F16]]:
    """Gates of ``layers`` layers, weights [neurons, weight_bytes] and scales, open for ones."""
    width, precision = model.stored_neuron_width, model.quantization.ffn
    size = scale_bytes(width, precision) // 2
    found = []
    for _ in range(layers):
        rows = fill(model.shape.ffn * weight_bytes(width, precision), _LOW_NIBBLES)
        scales = allocate("", model.shape.ffn * size * 2, huge=True).view(np.float16)
        scales[:] = -0.01
        found.append((rows.reshape(model.shape.ffn, -1), scales.reshape(model.shape.ffn, -1)))
    return found


def fill(size: int, mask: int = 0xFF) -> U8:
    """``size`` random bytes, repeated after 4 MiB, without the bits that ``mask`` lacks."""
    pattern = np.random.default_rng(0).integers(0, 256, _PATTERN_BYTES, np.uint8) & np.uint8(mask)
    room = allocate("", size, huge=True)
    for start in range(0, size, _PATTERN_BYTES):
        room[start : start + _PATTERN_BYTES] = pattern[: size - start]
    return room


def _make_tensor(item: DenseTensor) -> Tensor:
    if item.packing.is_float32:
        values: Raw = allocate("", 4 * item.rows * item.length).view(np.float32)
        values = values.reshape(item.rows, item.length)
        values[...] = np.float32(0.0 if "predictor_bias" in item.name else 1.0)
        return _wrap(item, values, None)
    weights = fill(item.rows * weight_bytes(item.length, item.precision))
    if item.name == EMBEDDING:
        weights[:] = 100  # what the layers get is then positive, and all neurons fire
    size = scale_bytes(item.length, item.precision)
    scales = None
    if size:
        scales = allocate("", item.rows * size, huge=True).view(np.float16).reshape(item.rows, -1)
        scales[:] = 0.002
    return _wrap(item, weights.reshape(item.rows, -1), scales)


def _wrap(item: DenseTensor, weights: Raw, scales: Scales | None) -> Tensor:
    precision = None if item.packing.is_float32 else item.precision
    return Tensor(
        name=item.name,
        rows=item.rows,
        length=item.length,
        precision=precision,
        weights=weights,
        scales=scales,
    )


def choose_slots(count: int, among: int, variants: int) -> Sequence[I32]:
    """Ascending slots of ``count`` of ``among`` neurons that lie apart, in several variants."""
    random = np.random.default_rng(1)
    return [
        np.sort(random.choice(among, count, replace=False)).astype(np.int32)
        for _ in range(variants)
    ]


NAMED = 0.14
"""Share of the neurons that a predictor names, about."""
_RECORDED = {"embed", "attend", "begin_ffn", "add_neurons", "end_ffn", "logits", "count_active"}
_RECORDED |= {"predict_low_rank", "predict_gate"}
_LEAST_TOKENS = 8
_KEPT = 0.95
"""Share of the times that counts: the longest are due to other work on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Work of a series' tokens in addition to the work of all tokens."""

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
        """Mean seconds of a call, of all tokens or of one position or number of named neurons."""
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
        loops: HostLoops,
        hot: float = 1.0,
    ) -> None:
        """``arena`` [n, stride]: some layers; ``hot``: share that stays, a cache holds the rest."""
        shape = model.shape
        layers = min(shape.layers, len(arena) // shape.ffn)
        stay = round(hot * shape.ffn)
        room = arena[: layers * shape.ffn]
        cache = NeuronCache(room, [range(stay)] * layers, shape.ffn, loops, policy="lfu")
        for _ in cache.fill():
            pass
        recorder: Any = _RecordingExecutor(executor)
        cache.find_indices = recorder.time_with("find", cache.find_indices)  # type: ignore[method-assign]
        feed_forward = FeedForward(
            recorder,
            cache,
            count_reads(room, layers, loops),
            arena[:2].reshape(2, 1, -1),
            layers=layers,
            decode=Decode(predictor=predictor),
        )
        context = max(work.position for work in works) + 1
        one = LayerModel(recorder, feed_forward, layers=layers, chunk=1)
        self._forward = Sequences(one, context=context, piece=1)
        self._recorder, self._layers, self._vocab = recorder, layers, shape.vocab
        self._works = list(works)
        self._named = {
            count: choose_slots(count, shape.ffn, 16) for count in {w.named for w in works}
        }
        self._stay = stay
        self._overhead_s = _time_recording()

    def count_cached(self, named: int) -> int:
        counts = [np.count_nonzero(item >= self._stay) for item in self._named[named]]
        return round(float(np.mean(counts)))

    def measure(self, seconds: float) -> TokenTimes:
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
    """Wraps an executor: times its calls, and predicts the wanted neurons."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._token = np.zeros(1, np.int32)
        self.begin([self._token])

    def begin(self, named: Sequence[I32]) -> None:
        """Begin a token, whose layers compute ``named`` in turn."""
        self.calls: list[tuple[str, float]] = []
        self.busy_s = 0.0
        """Seconds in all calls, including calls that only the measurement makes."""
        self._named = cycle(named)

    def time_with(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            if name == "begin_ffn":
                self._executor.embed(self._token)
            ready = time.perf_counter()
            result = method(*arguments)
            end = time.perf_counter()
            self.calls.append((name, end - ready))
            self.busy_s += end - start
            return next(self._named) if name.startswith("predict_") else result

        return call

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._executor, name)
        if name in _RECORDED:
            method = self.time_with(name, method)
            self.__dict__[name] = method  # the next look-up does not come here
        return method


def average_most(values: Sequence[float]) -> float:
    """Mean without the longest of many times."""
    return statistics.fmean(sorted(values)[: max(1, round(len(values) * _KEPT))])


def _time_recording() -> float:
    """Least seconds that recording adds to a call."""
    trials = []
    for _ in range(20):
        nothing: Any = SimpleNamespace(embed=lambda token: None)
        recorder = _RecordingExecutor(nothing)
        start = time.perf_counter()
        for _ in range(20):
            recorder.embed(None)
        trials.append((time.perf_counter() - start - recorder.busy_s) / 20)
    return max(min(trials), 0.0)
