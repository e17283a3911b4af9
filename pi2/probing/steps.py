"""Steps that are measured one by one: steps of prompts, and steps that tokens do not show."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pi2.arrays import U8, Scales
from pi2.backends.host import HostLoops
from pi2.backends.protocol import BuildRequest, Executor
from pi2.diagnostics import UserError
from pi2.memory.cache import NeuronCache
from pi2.plan.arithmetic.units import count_kv_token_bytes
from pi2.plan.documents.device import KernelName
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import ActivationType, KvType
from pi2.plan.weights.layout import matrix_bytes
from pi2.probing import tokens
from pi2.probing import tokens as synthetic
from pi2.probing.tokens import NAMED, TokenSample, TokenTimes, TokenWork

Key = tuple[str, ...]
"""The measurement: a kind, then its settings as text."""

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


def collect_rounds(
    measures: Sequence[tuple[Key, Callable[[], float]]], rounds: int
) -> dict[Key, list[float]]:
    """Measure everything in turn, ``rounds`` times: drift shows in every spread."""
    found: dict[Key, list[float]] = {key: [] for key, _ in measures}
    for _ in range(rounds):
        for key, measure in measures:
            found[key].append(measure())
    return found


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
    width: int = tokens.LARGE.width
    """Width of the model."""
    kv: KvType = "fp16"
    activations: ActivationType = "int16"

    @property
    def key(self) -> Key:
        return (self.kernel, str(self.size), str(self.width), self.kv, self.activations)


def keep_possible(step: StepFacts, times: Sequence[float], memory_bytes_s: float) -> list[float]:
    """Times of a step that memory of this rate allows; noise can make differences too small."""
    size = step.read_bytes or 0
    return [x for x in times if x > 0.0 and size / x <= MOST_CACHED * memory_bytes_s]


def choose_times(
    steps: Sequence[StepFacts], step_s: Mapping[Key, Sequence[float]], memory_bytes_s: float
) -> dict[Key, list[float]]:
    """Possible times of each step; UserError P343 if there is none, except for waking threads."""
    found = {step.key: keep_possible(step, step_s[step.key], memory_bytes_s) for step in steps}
    unclear = [step for step in steps if not found[step.key] and step.kernel != "wake"]
    if unclear:
        names = ", ".join(f"{step.kernel} {step.size}" for step in unclear)
        raise UserError.of(
            "P343",
            f"no possible time was measured of {names}: the machine does other work",
            help="end other programs and measure again",
        )
    return {key: times for key, times in found.items() if times}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(StepFacts):
    run: Callable[[int], float | None]
    """The timed calls; it may say itself how many seconds count."""
    base: Callable[[int], float | None] | None = None
    """Call whose time is subtracted: only the step's addition is measured."""
    stir: Callable[[int], None] | None = None
    """Runs before every call, untimed: it leaves the caches as other steps of a token do."""


def make_timer(step: Step) -> Callable[[], float]:
    """What measures a step: the median of one round's calls, in seconds."""

    def measure() -> float:
        taken = _time_calls(step.run, step.stir)
        return taken if step.base is None else max(taken - _time_calls(step.base, step.stir), 0.0)

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


class TokenSteps:
    """Steps of one variety, measured in tokens of ``model``."""

    def __init__(
        self,
        executor: Executor,
        arena: U8,
        model: Model,
        sizes: synthetic.ProbeShape,
        variety: Variety,
        *,
        used_bytes: int,
        loops: HostLoops | None = None,
    ) -> None:
        """``arena`` [n, stride]: neurons; ``used_bytes``: of one, without padding."""
        self._model, self._sizes, self._variety = model, sizes, variety
        self._used_bytes = used_bytes
        # Not the first token: what a block of keys holds beyond it takes time, too.
        self._first = sizes.context // 8
        works = [
            TokenWork(position=position, named=named)
            for named in sizes.gathered
            for position in (self._first, sizes.context)
        ]
        named = TokenWork(position=0, named=round(NAMED * model.shape.ffn))

        def make(works: list[TokenWork], hot: float) -> TokenSample:
            predictor: Literal["gate", "low-rank"] = "gate" if variety.has_gates else "low-rank"
            return TokenSample(
                executor, arena, model, predictor=predictor, works=works, hot=hot, loops=loops
            )

        self._sample = make(works, 1.0)
        self._cached = {share: make([named], share) for share in _SHARES.get(variety, ())}
        self._named = named.named

    def list_facts(self) -> list[StepFacts]:
        shape, precision, sizes = self._model.shape, self._model.quantization, self._sizes
        width, ffn = shape.stored_hidden, shape.ffn
        query = shape.heads * shape.head_dim
        qkv = query + 2 * shape.kv_heads * shape.head_dim
        attention = matrix_bytes(qkv, width, precision.attention)
        attention += matrix_bytes(width, shape.stored_query, precision.attention)
        context = sizes.context * count_kv_token_bytes(self._model, self._variety.kv)
        facts = [
            self._state("project", qkv + width, attention),
            self._state("attend", sizes.context, context),
        ]
        if self._variety.has_gates:
            gates = matrix_bytes(ffn, self._model.stored_neuron_width, precision.gates)
            facts.append(self._state("predict-gate", ffn, gates))
            # Gates are known: up and down are read.
            part = 2 * self._used_bytes // 3
            facts += [self._state("gather-open", n, n * part) for n in sizes.gathered]
            found = [sample.count_cached(self._named) for sample in self._cached.values()]
            return [*facts, *(self._state("find", count) for count in found)]
        predictor = matrix_bytes(sizes.rank, width, precision.predictor)
        predictor += matrix_bytes(ffn, sizes.rank, precision.predictor)
        facts += [
            self._state("multiply", shape.vocab, matrix_bytes(shape.vocab, width, precision.head)),
            self._state("predict", ffn, predictor),
            *(self._state("gather", n, n * self._used_bytes) for n in sizes.gathered),
        ]
        if self._variety == USUAL:
            facts += [
                self._state("norm", width),
                self._state("engine", shape.layers),
                self._state("engine-token", shape.layers),
            ]
            facts += [
                self._state("engine-cached", sample.count_cached(self._named))
                for share, sample in self._cached.items()
                if share < 1.0
            ]
        return facts

    def _state(self, kernel: KernelName, size: int, read_bytes: int | None = None) -> StepFacts:
        return StepFacts(
            kernel=kernel,
            size=size,
            read_bytes=read_bytes,
            width=self._sizes.width,
            kv=self._variety.kv,
            activations=self._variety.activations,
        )

    def measure(self) -> dict[Key, float]:
        times = self._sample.measure(SERIES_S)
        cached = {share: item.measure(CACHED_S) for share, item in self._cached.items()}
        found: dict[Key, float] = {}
        for facts in self.list_facts():
            found[facts.key] = self._read(facts, times)
        for share, sample in self._cached.items():
            count, own = sample.count_cached(self._named), cached[share]
            if self._variety.has_gates:
                found[self._state("find", count).key] = own.average("find")
            elif share == 1.0:
                found[self._state("engine", self._model.shape.layers).key] = own.python_s
            else:
                # Behind more Python, threads sleep and caches are cold: that belongs to it.
                later_s = own.average("add_neurons") - cached[1.0].average("add_neurons")
                found[self._state("engine-cached", count).key] = own.python_s + max(later_s, 0.0)
        return found

    def _read(self, facts: StepFacts, times: TokenTimes) -> float:
        context = self._sizes.context
        early_s = times.average("attend", position=self._first)
        late_s = times.average("attend", position=context)
        token_s = max(late_s - early_s, 0.0) / (context - self._first)
        match facts.kernel:
            case "project":
                return max(early_s - self._first * token_s, early_s / 2)
            case "attend":
                return context * token_s
            case "multiply":
                return times.average("logits")
            case "predict":
                return times.average("predict_low_rank")
            case "predict-gate":
                return times.average("predict_gate")
            case "gather" | "gather-open":
                return times.average("add_neurons", named=facts.size)
            case "norm":
                return times.average("begin_ffn") + times.average("end_ffn")
            case "engine-token":
                return times.average("embed") + times.average("count_active")
        return times.python_s


TOKENS = (8, 128)
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
            *(self._dense(tokens) for tokens in TOKENS),
            *(self._look_up(missing) for missing in self._sizes.missing),
            self._wake(),
        ]
        return [replace(step, width=self._sizes.width) for step in steps]

    def _project(self, tokens: int) -> Step:
        executor, layers, shape = self._executor, self._sizes.layers, self._model.shape
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        weights = qkv * shape.stored_hidden + shape.stored_hidden * shape.stored_query

        def run(index: int) -> None:
            if index == 0:
                executor.embed(self._many[:tokens])
            executor.attend(index % layers, 0)

        return Step(kernel="project-many", size=tokens, operations=2.0 * tokens * weights, run=run)

    def stir(self, index: int) -> None:
        """Read a layer's projections, and make the FFN's input anew: all ones."""
        executor = self._executor
        executor.embed(self._one)
        executor.attend(index % self._sizes.layers, 0)
        executor.embed(self._one)
        executor.begin_ffn(0)

    def _wake(self) -> Step:
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

        return Step(kernel="wake", size=REST_US, run=rest, base=compute)

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
