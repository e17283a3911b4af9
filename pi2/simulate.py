"""Simulation of a plan on a device that need not be at hand: what each token asks of each layer is
drawn, and `pi2.costs` gives the times."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pi2.arrays import F64, I64
from pi2.costs.constants import Constants, Range, describe_statuses
from pi2.costs.cost import (
    Cost,
    Description,
    cost_description,
    describe_range,
    list_dense_units,
    read_plan_rates,
)
from pi2.costs.cost_layer import (
    Counts,
    LayerCost,
    PromptCost,
    cost_counts,
    cost_prompt,
    count_read_bytes,
)
from pi2.costs.hotness import draw_experts, draw_shifts, draw_tokens
from pi2.costs.kernel_times import Rates
from pi2.costs.rates import list_missing_reads
from pi2.costs.settings import Settings
from pi2.costs.terms import LayerKind
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_bytes, approximate_number, approximate_share
from pi2.tracing import Recorder, add_legend, make_figure, save_figure

Progress = Callable[[float], None]

READ_LANE, DENSE_LANE, CPU_LANE = "flash", "dense unit", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Outcome of a simulated generation; arrays have one entry per token."""

    token_s: F64
    flash_s: F64
    """Time in which the flash was at work."""
    waiting_s: F64
    """Time in which nothing computed because of reads."""
    cpu_s: F64
    dense_s: F64
    read_bytes: F64
    active_neurons: F64
    """Neurons that a token needed, wherever they were."""
    missing_neurons: F64


def time_before(kind: LayerKind, positions: F64) -> F64:
    added = positions - kind.settings.position
    return kind.before_s + added * kind.position_s


def list_counts(
    description: Description, kind: LayerKind, shifts: F64, random: np.random.Generator
) -> tuple[list[Counts], I64]:
    """Different counts of neurons, and the place among them of each token and layer."""
    drawn = _draw_neurons(description.settings, kind, shifts, random)
    dense, hot, cached, missing = np.moveaxis(drawn, -1, 0)
    active = dense + hot + cached + missing
    rows = np.stack([active, missing, hot + cached, cached, hot * kind.hot_part], axis=-1)
    unique, where = np.unique(rows.reshape(-1, rows.shape[-1]), axis=0, return_inverse=True)
    absent = kind.activity.neurons * kind.activity.chosen * (1.0 - kind.hot)
    counts = [
        Counts(used=a, missing=b, resident=c, cached=d, hot_weight=e, absent=absent)
        for a, b, c, d, e in unique.tolist()
    ]
    return counts, where.reshape(active.shape).astype(np.int64)


def _draw_neurons(
    settings: Settings, kind: LayerKind, shifts: F64, random: np.random.Generator
) -> F64:
    """Active neurons [tokens, layers, PLACES]."""
    activity, dense_share = kind.activity, kind.dense_share
    shape = (len(shifts), kind.count)
    if kind.is_whole:
        # What does not stay streams by, whatever the cache has room for.
        every = np.full(shape, activity.neurons * activity.chosen)
        own, kept = every * dense_share, every * kind.hot
        return np.stack([own, kept - own, 0.0 * every, every - kept], axis=-1)
    if activity.grain > 1:
        used = activity.used
        missing = min(activity.count_missing(kind.hot, kind.cold, settings.policy), used)
        dense, hot = (activity.count_within(share) for share in (dense_share, kind.hot))
        shares = (dense, hot - dense, max(used - hot - missing, 0.0), missing)
        drawn = draw_experts(shares, used, activity.grain, shape, random, activity.always)
        if settings.limits is None:
            return drawn
        drawn[..., -1] = settings.limits.limit(drawn[..., -1] / activity.grain) * activity.grain
        return drawn
    hot, cold = activity.divide_room(kind.hot, kind.cold)
    hits = activity.find_hits(hot, cold, settings.policy)
    return draw_tokens(
        activity.named,
        hits,
        dense_share,
        kind.hot,
        activity.neurons * activity.chosen,
        shape=shape,
        variation=kind.rates.constants.token_variation,
        random=random,
        shifts=shifts,
        read_chances=activity.find_read_chances(kind.hot, hits, settings.leave_out),
    )


def _add_layers(total: dict[str, F64], kind: LayerKind, counts: list[Counts], where: I64) -> None:
    """Add the layers' times to their tokens, the places of whose counts are ``where``."""
    rows = []
    for own in counts:
        cost = cost_counts(kind, own, min(own.missing, 1.0))
        computed_s = cost.ffn_s - cost.wait_s
        size = count_read_bytes(kind, own)
        times = cost.ffn_s, cost.read_s, cost.wait_s, computed_s, cost.dense_s
        rows.append((*times, size, own.used, own.missing))
    for name, values in zip(DecodeRun.__dataclass_fields__, np.array(rows).T, strict=True):
        total[name] += values[where].sum(axis=1)


def trace_decode(
    description: Description, *, prompt_tokens: int, tokens: int, seed: int
) -> Recorder:
    random = np.random.default_rng(seed)
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    recorder, settings = Recorder(), description.settings
    works: dict[int, tuple[LayerKind, list[Counts]]] = {}
    for kind in description.kinds:
        counts, where = list_counts(description, kind, shifts, random)
        for place, number in enumerate(kind.layers):
            works[number] = kind, [counts[at] for at in where[:, place].tolist()]
    lanes = [f"{CPU_LANE} thread {number}" for number in range(settings.threads)]
    row_s = settings.batch * description.embedding_s
    for token in range(tokens):
        recorder.add_slice(READ_LANE, "embedding", 0.0, row_s)
        recorder.offset_s += row_s
        position = np.array([float(prompt_tokens + token)])
        for number in range(description.layers):
            kind, drawn = works[number]
            before_s = float(time_before(kind, position)[0])
            for lane in [*lanes, DENSE_LANE] if settings.attention_share > 0.0 else lanes:
                recorder.add_slice(lane, "attention", 0.0, before_s)
            recorder.offset_s += before_s
            ahead_s = 0.0 if kind.settings.look_ahead == "none" else before_s
            own = drawn[token]
            cost = cost_counts(kind, own, min(own.missing, 1.0))
            _trace_layer(recorder, lanes, cost, own, ahead_s)
        for lane in [*lanes, DENSE_LANE] if settings.head_share > 0.0 else lanes:
            recorder.add_slice(lane, f"head, token {token}", 0.0, description.head_s)
        recorder.offset_s += description.head_s
    return recorder


def _trace_layer(
    recorder: Recorder, lanes: list[str], cost: LayerCost, counts: Counts, ahead_s: float
) -> None:
    """Record a layer's FFN: resident neurons, then read ones; reads may begin ``ahead_s`` ago."""
    found_s = cost.predict_s + cost.look_up_s
    computed_s = max(cost.ffn_s - cost.wait_s - found_s, 0.0)
    all_neurons = max(counts.hot_weight + counts.cached + counts.missing, 1e-9)
    last_s = cost.ffn_s - computed_s * counts.missing / all_neurons
    for lane in lanes:
        recorder.add_slice(lane, "predict", 0.0, cost.predict_s)
        recorder.add_slice(lane, "look up", cost.predict_s, found_s)
        recorder.add_slice(lane, "compute resident", found_s, last_s - cost.wait_s)
        recorder.add_slice(lane, "compute read", last_s, cost.ffn_s)
    recorder.add_slice(DENSE_LANE, "hot neurons", 0.0, cost.dense_s)
    if cost.read_s > 0.0:
        first_s = -ahead_s if ahead_s else found_s
        read_s = max(min(first_s + cost.read_s, last_s), first_s)
        recorder.add_slice(READ_LANE, "read neurons", first_s, read_s)
        recorder.add_flow(READ_LANE, read_s, lanes[0], last_s)
    recorder.offset_s += cost.ffn_s


def simulate_layers(description: Description) -> tuple[float, ...]:
    """Mean seconds in each layer of 64 tokens after a prompt of 64; layers of one kind are
    equal."""
    random, tokens = np.random.default_rng(0), 64
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    positions = tokens + np.arange(tokens, dtype=np.float64)
    times: dict[int, float] = {}
    for kind in description.kinds:
        total = {name: np.zeros(tokens) for name in DecodeRun.__dataclass_fields__}
        _add_layers(total, kind, *list_counts(description, kind, shifts, random))
        ffn_s = float(total["token_s"].mean()) / kind.count
        before_s = float(time_before(kind, positions).mean())
        times |= dict.fromkeys(kind.layers, before_s + ffn_s)
    return tuple(times[number] for number in range(description.layers))


PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Estimate from the device's power figures; a unit at rest counts as nothing."""

    token_j: float
    mean_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Outcome of `simulate`."""

    inputs: Description
    seed: int
    prompt_tokens: int
    prefill: PromptCost | None
    """None if the device states no arithmetic rate."""
    decode: DecodeRun

    @property
    def tokens_s(self) -> float:
        batch = self.inputs.settings.batch
        return batch * len(self.decode.token_s) / float(self.decode.token_s.sum())

    def find_percentile_s(self, percent: float) -> float:
        """Time that ``percent`` of all tokens do not exceed."""
        return float(np.percentile(self.decode.token_s, percent))

    @property
    def waiting_share(self) -> float:
        """Part of the time in which nothing computed because of reads."""
        return float(self.decode.waiting_s.sum() / self.decode.token_s.sum())

    @property
    def miss_rate(self) -> float:
        active = float(self.decode.active_neurons.sum())
        return float(self.decode.missing_neurons.sum()) / active if active else 0.0

    @property
    def energy(self) -> Energy | None:
        """Power of the working units times their time: all units, the CPU or the other one."""
        rates, run = self.inputs.rates, self.decode
        if rates.power_w is None and rates.both_w is None:
            return None
        cpu_w = rates.power_w or rates.both_w or 0.0
        total = float(run.token_s.sum())
        dense_s = min(float(run.dense_s.sum()), total) if self.inputs.uses_dense else 0.0
        energy = cpu_w * (total - dense_s) + (rates.both_w or cpu_w) * dense_s
        tokens = len(run.token_s) * self.inputs.settings.batch
        return Energy(token_j=energy / tokens, mean_w=energy / total)

    @property
    def expected(self) -> Cost:
        """Use expected numbers of neurons instead of drawn ones, as `pi2 plan` does."""
        return cost_description(self.inputs)

    @property
    def range_tokens_s(self) -> Range:
        """Tokens per second of the run, and of the same with all rates low or high."""
        low, expected, high = astuple(self.expected.range_tokens_s)
        return Range(
            low=self.tokens_s * low / expected,
            expected=self.tokens_s,
            high=self.tokens_s * high / expected,
        )

    def describe(self) -> dict[str, Any]:
        round4 = partial(round, ndigits=4)
        run, prefill, energy = self.decode, self.prefill, self.energy
        tokens = len(run.token_s)
        active = run.active_neurons + (run.active_neurons == 0)
        return {
            "simulated": True,
            "plan": self.inputs.name,
            "plan_digest": self.inputs.digest,
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "tokens": tokens,
            "prefill": prefill
            and {
                "tokens_s": round4(prefill.tokens_s),
                "duration_s": round4(prefill.duration_s),
                "read_bytes": round(prefill.read_bytes),
            },
            "decode": {
                "tokens_s": round4(self.tokens_s),
                "range": self.range_tokens_s.describe(),
                "mean_ms": round4(float(run.token_s.mean()) * 1e3),
                **{
                    f"p{percent}_ms": round4(self.find_percentile_s(percent) * 1e3)
                    for percent in PERCENTILES
                },
                "waiting_share": round4(self.waiting_share),
                "flash_share": round4(float(run.flash_s.sum() / run.token_s.sum())),
                "cpu_share": round4(float(run.cpu_s.sum() / run.token_s.sum())),
                "dense_share": round4(float(run.dense_s.sum() / run.token_s.sum())),
                "hit_rate": round4(1.0 - self.miss_rate),
                "miss_rate_p99": round4(float(np.percentile(run.missing_neurons / active, 99))),
                "active_neurons": round(float(run.active_neurons.mean())),
                "read_bytes_per_token": round(float(run.read_bytes.mean())),
            },
            "expected": {
                "tokens_s": round4(self.expected.tokens_s),
                "range": self.expected.range_tokens_s.describe(),
                "context": self.inputs.settings.position,
            },
            "energy": energy and {key: round4(x) for key, x in asdict(energy).items()},
            "assumptions": list(self.inputs.assumptions),
            "provenance": {
                "figures": dict(sorted(Counter(x.status for x in self.inputs.figures).items())),
                "sources": list(map(asdict, self.inputs.figures)),
            },
        }

    def summarise(self) -> str:
        run, decode = self.describe()["decode"], self.decode
        lines = [f"SIMULATED, not measured: {self.inputs.name}"]
        if self.prefill is None:
            unit = self.inputs.prompts.unit
            lines.append(
                f"prefill   not simulated: {unit} computes prompts, and the device states no "
                f"units.{unit}.compute"
            )
        else:
            lines.append(
                f"prefill   {self.prefill.tokens_s:.1f} tokens/s, {self.prefill.tokens} tokens "
                f"in {self.prefill.duration_s:.2f} s, "
                f"{approximate_bytes(self.prefill.read_bytes)} read"
            )
        percentiles = " · ".join(f"P{p} {run[f'p{p}_ms']:.1f}" for p in PERCENTILES)
        lines.append(
            f"decode    {self.range_tokens_s.write()} tokens/s over {len(decode.token_s)} tokens; "
            f"ms per token: mean {run['mean_ms']:.1f} · {percentiles}"
        )
        cost = self.expected
        lines.append(
            f"expected  {cost.range_tokens_s.write()} tokens/s after {cost.settings.position} "
            "tokens of context, as `pi2 plan` and `pi2 explain --cost` say"
        )
        hits = f"cache hits {run['hit_rate']:.1%}"
        if self.inputs.settings.predictor == "none":
            hits = "every neuron is computed, and nothing is put into the cache"
        lines.append(
            f"reads     {approximate_bytes(run['read_bytes_per_token'])} per token; flash busy "
            f"{run['flash_share']:.0%}, computing waits for it "
            f"{approximate_share(run['waiting_share'])}; {hits}"
        )
        if self.energy is not None:
            lines.append(
                f"energy    about {self.energy.token_j:.3f} J per token, {self.energy.mean_w:.1f} W"
            )
        lines += [f"assumed   {text}" for text in self.inputs.assumptions]
        lines.append("inputs    " + describe_statuses(self.inputs.figures))
        return "\n".join(lines)


def draw_run(result: SimulationResult, file_format: str) -> bytes:
    """Draw times between tokens in order and sorted; UserError P632 without matplotlib."""
    milliseconds = result.decode.token_s * 1e3
    figure = make_figure(10, 4)
    left, right = figure.subplots(1, 2)
    left.plot(np.arange(1, len(milliseconds) + 1), milliseconds, linewidth=0.8)
    left.set_xlabel("token")
    left.set_ylim(bottom=0.0)
    left.set_ylabel("ms per token")
    ordered = np.sort(milliseconds)
    right.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    for percent, line in zip(PERCENTILES, (":", "--", "-."), strict=True):
        place = result.find_percentile_s(percent) * 1e3
        label = f"P{percent:g}: {approximate_number(place, 4)} ms"
        right.axvline(place, linestyle=line, linewidth=1.0, color="gray", label=label)
    add_legend(right)
    right.set_xlabel("ms per token")
    right.set_ylabel("share of tokens that take no longer")
    figure.suptitle(f"Simulated, not measured: {result.inputs.name}")
    return save_figure(figure, file_format)


def simulate(
    description: Description,
    *,
    prompt_tokens: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    progress: Progress = lambda share: None,
) -> SimulationResult:
    """Simulate a prompt, and a generation of ``tokens`` after it in every sequence of the batch;
    the same seed gives the same result."""
    assert tokens > 0, tokens
    random = np.random.default_rng(seed)
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    total = {name: np.zeros(tokens) for name in DecodeRun.__dataclass_fields__}
    # Outside of the layers there are the output head, rows and pages from flash.
    settings, head_s = description.settings, description.head_s
    stalled = settings.batch * description.embedding_s
    total["token_s"] += head_s + stalled
    total["flash_s"] += stalled
    total["waiting_s"] += stalled
    total["cpu_s"] += head_s
    total["dense_s"] += head_s if settings.head_share > 0.0 else 0.0
    positions = prompt_tokens + np.arange(tokens, dtype=np.float64)
    done = 0
    for kind in description.kinds:
        before_s = kind.count * time_before(kind, positions)
        total["token_s"] += before_s
        total["cpu_s"] += before_s
        if settings.attention_share > 0.0:
            total["dense_s"] += before_s
        _add_layers(total, kind, *list_counts(description, kind, shifts, random))
        done += kind.count
        progress(done / description.layers)
    return SimulationResult(
        inputs=description,
        seed=seed,
        prompt_tokens=prompt_tokens,
        prefill=cost_prompt(description, prompt_tokens),
        decode=DecodeRun(**total),
    )


MISSING_FIGURE = "P330"
UNSUPPORTED_SPLIT = "P331"


def read_inputs(
    resolved: ResolvedPlan, rates: Rates | None = None, constants: Constants | None = None
) -> Description:
    """Describe a plan; UserError P330, P331 for missing figures.  ``rates`` replace its own."""
    findings = list(_check_units(resolved))
    try:
        rates = read_plan_rates(resolved, constants) if rates is None else rates
        description = describe_range(resolved, rates, store=resolved.store_path)
    except UserError as error:
        span = Span.of_file(str(resolved.path))
        found = dict.fromkeys(error.diagnostics)
        if any(layer.hot < 1.0 for layer in resolved.layers):
            # What is missing first hides what is missing later.
            found |= dict.fromkeys(list_missing_reads(resolved.device))
        findings += [replace(item, code=MISSING_FIGURE, span=span) for item in found]
    if findings:
        raise UserError(tuple(findings), exit_code=2)
    return description


def _check_units(resolved: ResolvedPlan) -> Iterator[Diagnostic]:
    names, span = list_dense_units(resolved), Span.of_file(str(resolved.path))
    refuse = partial(Diagnostic, code=UNSUPPORTED_SPLIT, span=span)
    if len(names) > 1:
        message = f"layers are given to {', '.join(names)}: the simulator knows the CPU and one "
        yield refuse(
            message=f"{message}other unit", help=f"give the layers of `{names[-1]}` to `{names[0]}`"
        )
    if names and resolved.device.units[names[0]].emulated:
        message = f"the unit {names[0]!r} is the processor itself, emulating another one"
        yield refuse(message=message, help="give the layers to `cpu`")
