"""Steps that are measured one by one: steps of prompts, and steps that tokens do not show."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from pi2.arrays import U8, Scales
from pi2.backends.executor import Executor
from pi2.backends.host import HostLoops
from pi2.backends.protocol import BuildRequest
from pi2.diagnostics import UserError
from pi2.memory.cache import NeuronCache
from pi2.plan.arithmetic.units import count_kv_token_bytes
from pi2.plan.documents.device import KernelName
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import ActivationType, KvType
from pi2.plan.weights.layout import matrix_bytes
from pi2.probing import tokens as synthetic
from pi2.probing.tokens import NAMED, TokenSample, TokenTimes, TokenWork

Thing = TypeVar("Thing")
Timer = Callable[[], float]
"""Measures a thing once: a step by the median seconds of a round's calls."""

DIGITS = 4
"""Significant digits of a figure: more would be noise."""


AGREED = 0.05
"""The two best figures of a thing agree if they differ by no more than this part."""

Better = Literal["less", "more", "neither"]
"""What an undisturbed machine shows: less of a time, more of a rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What stands for the measurements, their relative standard deviation, and their number."""

    value: float
    spread: float
    samples: int


def summarise(values: Sequence[float], better: Better = "neither") -> Summary:
    """Best quartile of times (``less``) or rates (``more``), else the median, and the spread. Other
    work only slows the machine; the quartile avoids single lucky figures."""
    assert values, "nothing was measured"
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) / mean if len(values) > 1 and mean else 0.0
    value = statistics.median(values)
    if better != "neither" and len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
        value = quartiles[0] if better == "less" else quartiles[2]
    return Summary(value=round_digits(value), spread=round(spread, 4), samples=len(values))


def is_agreed(values: Sequence[float], better: Better) -> bool:
    """Whether the two best measurements agree: the machine was not disturbed in either."""
    if len(values) < 2:
        return False
    best, second = sorted(values, reverse=better == "more")[:2]
    return abs(best - second) <= AGREED * abs(best)


def round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def collect_rounds(measures: Mapping[Thing, Timer], rounds: int) -> dict[Thing, list[float]]:
    """Measure everything in turn, ``rounds`` times: drift shows in every spread."""
    found: dict[Thing, list[float]] = {thing: [] for thing in measures}
    for _ in range(rounds):
        for thing, measure in measures.items():
            found[thing].append(measure())
    return found


def add_figures(kept: dict[Thing, list[float]], more: Mapping[Thing, Sequence[float]]) -> None:
    for thing, values in more.items():
        kept.setdefault(thing, []).extend(values)


MOST_CACHED = 20.0
"""Rate of a processor's nearest caches relative to its memory, at most."""
ROUND_S = 0.15
"""Time that a kernel is called for in a round; the round's figure is the median call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step reads and computes; sent between processes."""

    kernel: KernelName
    size: int
    read_bytes: int | None = None
    operations: float | None = None
    width: int | None = synthetic.LARGE.width
    """Width of the model, if the time depends on it."""
    kv: KvType = "fp16"
    activations: ActivationType = "int16"


Times = dict[StepFacts, list[float]]
"""Seconds of each step, as often as it was measured."""


def keep_possible(step: StepFacts, times: Sequence[float], memory_bytes_s: float) -> list[float]:
    """Times of a step that memory of this rate allows; noise can make differences too small."""
    size = step.read_bytes or 0
    return [x for x in times if x > 0.0 and size / x <= MOST_CACHED * memory_bytes_s]


def choose_times(step_s: Times, memory_bytes_s: float) -> Times:
    """Possible times of each step; UserError P343 if there is none, except for waking threads."""
    found = {step: keep_possible(step, times, memory_bytes_s) for step, times in step_s.items()}
    unclear = [step for step, times in found.items() if not times and step.kernel != "wake"]
    if unclear:
        names = ", ".join(f"{step.kernel} {step.size}" for step in unclear)
        raise UserError.of(
            "P343",
            f"no possible time was measured of {names}: the machine does other work",
            help="end other programs and measure again",
        )
    return {step: times for step, times in found.items() if times}


Run = Callable[[int], float | None]
"""A timed call, by its number; it may say itself how many seconds count."""


def make_timer(run: Run, base: Run | None = None, stir: Run | None = None) -> Timer:
    """Time ``run`` less the time of ``base``; ``stir`` runs before every call, untimed, and leaves
    the caches as other steps of a token do."""

    def measure() -> float:
        taken = _time_calls(run, stir)
        return taken if base is None else max(taken - _time_calls(base, stir), 0.0)

    return measure


def _time_calls(run: Run, stir: Run | None) -> float:
    """Median seconds of a call; the first ones make ready and do not count."""
    times: list[float] = []
    index, end = 0, time.perf_counter() + ROUND_S
    while len(times) < 7 or time.perf_counter() < end:
        if stir is not None:
            stir(index)
        start = time.perf_counter()
        own_s = run(index)
        times.append(time.perf_counter() - start if own_s is None else own_s)
        index += 1
    return statistics.median(times[2:])


SERIES_S, CACHED_S = 0.4, 0.2
"""Time of a variety's tokens in a round, and of tokens that take neurons from a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variety:
    """Options that an executor is built with."""

    kv: KvType = "fp16"
    activations: ActivationType = "int16"
    has_gates: bool = False

    def choose_types(self, request: BuildRequest) -> BuildRequest:
        """``request`` with this variety's types, and empty gates if it has gates."""
        gates: dict[int, tuple[U8, Scales | None]] | None = {} if self.has_gates else None
        return replace(request, kv_type=self.kv, token_type=self.activations, gate_rows=gates)

    def apply(self, request: BuildRequest, layers: int) -> BuildRequest:
        """``request`` with this variety's types and gates, for the first ``layers`` layers."""
        chosen = self.choose_types(request)
        if not self.has_gates:
            return chosen
        rows = synthetic.make_gate_rows(request.model, layers)
        # Only the first layers run; the others' gates are never read.
        gates = {layer: rows[min(layer, layers - 1)] for layer in range(request.model.shape.layers)}
        return replace(chosen, gate_rows=gates)


USUAL = Variety()
GATES = Variety(kv="int8", has_gates=True)
EXACT = Variety(kv="fp32", activations="fp32")
_SHARES = {USUAL: (1.0, 0.95, 0.5), GATES: (1.0, 0.5)}
"""Shares of resident neurons at which the engine's own part is measured."""


Read = Callable[[Mapping[float, TokenTimes]], float]
"""Seconds of a step by the times of tokens, which are kept by the share of resident neurons."""
_ALL = 2.0
"""Stands for tokens of all works, whose neurons are all resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A model whose steps are measured, with neurons in memory."""

    model: Model
    sizes: synthetic.ProbeShape
    arena: U8
    """Neurons [n, stride]."""
    used_bytes: int
    """Bytes of a neuron, without padding."""
    loops: HostLoops
    """Loops of the neuron cache."""


class TokenSteps:
    """Steps of one variety, measured in tokens of a model."""

    def __init__(self, executor: Executor, probed: Probed, variety: Variety) -> None:
        model, sizes = probed.model, probed.sizes
        self._model, self._sizes, self._variety = model, sizes, variety
        # Not the first token: what a block of keys holds beyond it takes time, too.
        self._first = sizes.context // 8
        works = [
            TokenWork(position=position, named=named)
            for named in sizes.gathered
            for position in (self._first, sizes.context)
        ]
        named = TokenWork(position=0, named=round(NAMED * model.shape.ffn))
        predictor: Literal["gate", "low-rank"] = "gate" if variety.has_gates else "low-rank"
        self._samples = {
            share: TokenSample(
                executor,
                probed.arena,
                model,
                predictor=predictor,
                works=own,
                hot=hot,
                loops=probed.loops,
            )
            for share, hot, own in (
                (_ALL, 1.0, works),
                *((share, share, [named]) for share in _SHARES.get(variety, ())),
            )
        }
        self.steps = dict(self._list_steps(probed.used_bytes, named.named))

    def measure(self) -> dict[StepFacts, float]:
        times = {
            share: sample.measure(SERIES_S if share == _ALL else CACHED_S)
            for share, sample in self._samples.items()
        }
        return {facts: read(times) for facts, read in self.steps.items()}

    def _list_steps(self, used_bytes: int, named: int) -> Iterator[tuple[StepFacts, Read]]:
        model, sizes, variety = self._model, self._sizes, self._variety
        shape, precision, gathered = model.shape, model.quantization, sizes.gathered
        width, ffn = shape.stored_hidden, shape.ffn
        cached = {share: item for share, item in self._samples.items() if share != _ALL}

        def state(kernel: KernelName, size: int, read_bytes: int | None = None) -> StepFacts:
            return StepFacts(
                kernel=kernel,
                size=size,
                read_bytes=read_bytes,
                width=sizes.width,
                kv=variety.kv,
                activations=variety.activations,
            )

        def add(*names: str, share: float = _ALL, named: int | None = None) -> Read:
            return lambda times: sum(times[share].average(name, named=named) for name in names)

        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        attention = matrix_bytes(qkv, width, precision.attention)
        attention += matrix_bytes(width, shape.stored_query, precision.attention)
        context = sizes.context * count_kv_token_bytes(model, variety.kv)
        yield state("project", qkv + width, attention), self._time_projections
        yield state("attend", sizes.context, context), self._time_context
        if variety.has_gates:
            gates = matrix_bytes(ffn, model.stored_neuron_width, precision.gates)
            yield state("predict-gate", ffn, gates), add("predict_gate")
            part = 2 * used_bytes // 3  # gates are known: up and down are read
            for count in gathered:
                yield state("gather-open", count, count * part), add("add_neurons", named=count)
            for share, sample in cached.items():
                yield state("find", sample.count_cached(named)), add("find", share=share)
            return
        head = matrix_bytes(shape.vocab, width, precision.head)
        predictor = matrix_bytes(sizes.rank, width, precision.predictor)
        predictor += matrix_bytes(ffn, sizes.rank, precision.predictor)
        yield state("multiply", shape.vocab, head), add("logits")
        yield state("predict", ffn, predictor), add("predict_low_rank")
        for count in gathered:
            yield state("gather", count, count * used_bytes), add("add_neurons", named=count)
        if not cached:
            return
        yield state("norm", width), add("begin_ffn", "end_ffn")
        yield state("engine", shape.layers), lambda times: times[1.0].python_s
        yield state("engine-token", shape.layers), add("embed", "count_active")
        for share in [share for share in cached if share < 1.0]:

            def read(times: Mapping[float, TokenTimes], share: float = share) -> float:
                # Behind more Python, threads sleep and caches are cold: that belongs to it.
                computed_s, usual_s = (times[x].average("add_neurons") for x in (share, 1.0))
                return times[share].python_s + max(computed_s - usual_s, 0.0)

            yield state("engine-cached", cached[share].count_cached(named)), read

    def _find_context(self, times: Mapping[float, TokenTimes]) -> tuple[float, float]:
        """Seconds of the first position, and of every further token of the context."""
        early_s, late_s = (
            times[_ALL].average("attend", position=position)
            for position in (self._first, self._sizes.context)
        )
        return early_s, max(late_s - early_s, 0.0) / (self._sizes.context - self._first)

    def _time_projections(self, times: Mapping[float, TokenTimes]) -> float:
        early_s, token_s = self._find_context(times)
        return max(early_s - self._first * token_s, early_s / 2)

    def _time_context(self, times: Mapping[float, TokenTimes]) -> float:
        return self._sizes.context * self._find_context(times)[1]


TOKENS = (8, 128)
REST_US = 2000
"""Microseconds without work after which threads sleep."""
VARIANTS = 16
"""Number of inputs that calls take in turn."""


class Steps:
    """Steps of prompts, and steps that tokens do not show."""

    def __init__(self, executor: Executor, probed: Probed) -> None:
        self._executor = executor
        self._probed, self._model, self._sizes = probed, probed.model, probed.sizes
        self._many = np.arange(synthetic.CHUNK, dtype=np.int32)
        self._one = self._many[:1]

    def list_all(self) -> Iterator[tuple[StepFacts, Timer]]:
        """Every step, in the order in which they are measured."""
        shape, layers = self._model.shape, self._sizes.layers
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        projected = qkv * shape.stored_hidden + shape.stored_hidden * shape.stored_query
        state = partial(StepFacts, width=self._sizes.width)
        neurons = self._sizes.dense_neurons
        dense = 3 * neurons * self._model.stored_neuron_width
        for count in TOKENS:
            facts = state(kernel="project-many", size=count, operations=2.0 * count * projected)
            yield (
                facts,
                make_timer(self._begin(count, lambda at: self._executor.attend(at % layers, 0))),
            )

        def add_dense(index: int) -> None:
            start = index % VARIANTS * neurons
            self._executor.add_dense(0, self._probed.arena[start : start + neurons])

        for count in TOKENS:
            work, size_bytes = 2.0 * count * dense, neurons * self._probed.used_bytes
            facts = state(kernel="dense", size=count, operations=work, read_bytes=size_bytes)
            yield facts, make_timer(self._begin(count, add_dense))
        for missing in self._sizes.missing:
            look_up = self._make_look_up(missing)
            base = self._make_look_up(0) if missing else None
            yield state(kernel="look-up", size=missing), make_timer(look_up, base, self.stir)
        self.stir(0)
        slots = synthetic.choose_slots(self._sizes.gathered[0], self._sizes.arena_neurons, VARIANTS)

        def compute(index: int) -> float:
            start = time.perf_counter()
            self._executor.add_neurons(0, self._probed.arena, slots[index % VARIANTS])
            return time.perf_counter() - start

        def rest(index: int) -> float:
            time.sleep(REST_US / 1e6)
            return compute(index)

        yield state(kernel="wake", size=REST_US), make_timer(rest, compute)

    def stir(self, index: int) -> None:
        """Read a layer's projections, and make the FFN's input anew: all ones."""
        self._executor.embed(self._one)
        self._executor.attend(index % self._sizes.layers, 0)
        self._executor.embed(self._one)
        self._executor.begin_ffn(0)

    def _begin(self, tokens: int, run: Callable[[int], None]) -> Run:
        """``run`` with ``tokens``, which its first call sets."""

        def call(index: int) -> None:
            if index == 0:
                self._executor.embed(self._many[:tokens])
                self._executor.begin_ffn(0)
            run(index)

        return call

    def _make_look_up(self, missing: int) -> Callable[[int], None]:
        neurons, first = self._sizes.neurons, self._sizes.neurons * 2 // 7
        arena = np.zeros((2 * first, 64), np.uint8)
        cache = NeuronCache(arena, [range(first)], neurons, self._probed.loops, policy="lfu")
        hot = np.linspace(0, first - 1, self._sizes.named - missing).astype(np.int32)
        cold = synthetic.choose_slots(missing, neurons - first, 4 * VARIANTS)
        wanted = [np.concatenate([hot, first + item]).astype(np.int32) for item in cold]

        def run(index: int) -> None:
            found = cache.look_up(0, wanted[index % len(wanted)])
            cache.hold(found)
            cache.release(found)

        return run
