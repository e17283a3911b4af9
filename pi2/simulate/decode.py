"""Token generation: draws what every token asks of every layer, and adds up what that takes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F64, I64
from pi2.costs.cost import Description
from pi2.costs.cost_layer import Counts, LayerCost, cost_counts, count_read_bytes
from pi2.costs.hotness import draw_experts, draw_shifts, draw_tokens
from pi2.costs.settings import Settings
from pi2.costs.terms import LayerKind
from pi2.tracing import Recorder

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


def simulate_decode(
    description: Description,
    *,
    prompt_tokens: int,
    tokens: int,
    seed: int,
    progress: Progress | None = None,
) -> DecodeRun:
    """Generate ``tokens`` after ``prompt_tokens``, in every sequence of the batch."""
    assert tokens > 0, tokens
    random = np.random.default_rng(seed)
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    total = _start_tokens(description, tokens)
    positions = prompt_tokens + np.arange(tokens, dtype=np.float64)
    done = 0
    for kind in description.kinds:
        before_s = kind.count * time_before(kind, positions)
        total["token_s"] += before_s
        total["cpu_s"] += before_s
        if description.settings.attention_share > 0.0:
            total["dense_s"] += before_s
        _add_layers(total, kind, *list_counts(description, kind, shifts, random))
        done += kind.count
        if progress is not None:
            progress(done / description.layers)
    return DecodeRun(**total)


def time_before(kind: LayerKind, positions: F64) -> F64:
    added = positions - kind.settings.position
    return kind.before_s + added * kind.position_s


def _start_tokens(description: Description, tokens: int) -> dict[str, F64]:
    """What every token costs outside of the layers: the output head, rows and pages from flash."""
    zeros = np.zeros(tokens)
    head_s, settings = description.head_s, description.settings
    stalled = settings.batch * description.embedding_s
    return {
        "token_s": zeros + head_s + stalled,
        "flash_s": zeros + stalled,
        "waiting_s": zeros + stalled,
        "cpu_s": zeros + head_s,
        "dense_s": zeros + (head_s if settings.head_share > 0.0 else 0.0),
        "read_bytes": zeros.copy(),
        "active_neurons": zeros.copy(),
        "missing_neurons": zeros.copy(),
    }


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
