"""Token generation: draws what every token asks of every layer, and adds up the layers' times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pi2.arrays import F64, I64
from pi2.costs.activations import TokenDraws, draw_experts, draw_shifts, draw_tokens
from pi2.costs.description import Description, LayerKind
from pi2.simulate.layer import (
    CPU_LANE,
    DENSE_LANE,
    READ_LANE,
    LayerSimulation,
    LayerTimes,
    LayerWork,
)
from pi2.tracing import Recorder

Progress = Callable[[float], None]

_FEW = 16
"""Different counts of which each is simulated, instead of the points of a grid around them."""
_STEP = 1.15
"""Ratio of neighbouring counts of neurons for which a layer is simulated."""


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
        simulation = LayerSimulation(description, kind)
        works = draw_work(description, kind, simulation, shifts, random)
        before_s = time_before(simulation, positions)
        for name in ("token_s", "cpu_s"):
            total[name] += kind.count * before_s
        if description.settings.attention_share > 0.0:
            total["dense_s"] += kind.count * before_s
        add_layers(total, simulation, works)
        done += kind.count
        if progress is not None:
            progress(done / description.layers)
    return DecodeRun(**total)


def time_before(simulation: LayerSimulation, positions: F64) -> F64:
    terms = simulation.terms
    added = positions - simulation.plan.settings.position
    return terms.before_s + added * terms.position_s


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Neurons per token and layer [tokens, layers], before rounding."""

    resident: F64
    cached: F64
    missing: F64
    active: F64
    """Active neurons, wherever they are computed."""


def draw_work(
    description: Description,
    kind: LayerKind,
    simulation: LayerSimulation,
    shifts: F64,
    random: np.random.Generator,
) -> TokenWork:
    settings, activity = simulation.plan.settings, kind.activity
    possible = activity.neurons * activity.chosen
    every = np.full((len(shifts), kind.count), possible)
    none = np.zeros_like(every)
    dense_share = description.find_dense(kind)
    if settings.predictor == "none":
        # What does not stay streams by, whatever the cache has room for.
        missing = every * (1.0 - kind.hot)
        resident = every - every * dense_share - missing
        return TokenWork(resident=resident, cached=none, missing=missing, active=every)
    drawn = _draw_neurons(description, kind, shifts, random)
    return TokenWork(
        resident=drawn.hot * simulation.terms.hot_part + drawn.cached,
        cached=drawn.cached,
        missing=drawn.missing,
        active=drawn.dense + drawn.hot + drawn.cached + drawn.missing,
    )


def _draw_neurons(
    description: Description, kind: LayerKind, shifts: F64, random: np.random.Generator
) -> TokenDraws:
    activity, settings = kind.activity, description.settings
    dense_share = description.find_dense(kind)
    shape = (len(shifts), kind.count)
    if activity.grain > 1:
        used = activity.used
        missing = min(activity.count_missing(kind.hot, kind.cold, settings.policy), used)
        dense, hot = (activity.count_within(share) for share in (dense_share, kind.hot))
        shares = (dense, hot - dense, max(used - hot - missing, 0.0), missing)
        drawn = draw_experts(shares, used, activity.grain, shape, random, activity.always)
        if settings.limits is None:
            return drawn
        read = settings.limits.limit(drawn.missing / activity.grain) * activity.grain
        return replace(drawn, missing=read)
    hot, cold = activity.divide_room(kind.hot, kind.cold)
    hits = activity.find_hits(hot, cold, settings.policy)
    return draw_tokens(
        activity.named,
        hits,
        dense_share,
        kind.hot,
        activity.neurons * activity.chosen,
        shape=shape,
        variation=description.rates.constants.token_variation,
        random=random,
        shifts=shifts,
        read_chances=activity.find_read_chances(kind.hot, hits, settings.leave_out),
    )


def add_layers(total: dict[str, F64], simulation: LayerSimulation, work: TokenWork) -> None:
    """Add the layers' times to their tokens, simulated on a grid of counts and interpolated."""
    times = _look_up_times(simulation, work.resident, work.missing)
    for number, name in enumerate(COLUMNS):
        total[name] += times[..., number].sum(axis=1)
    touched_s = simulation.terms.touch_s * work.cached.sum(axis=1)
    total["token_s"] += touched_s
    total["cpu_s"] += touched_s
    total["read_bytes"] += (times[..., len(COLUMNS)] * work.missing).sum(axis=1)
    total["active_neurons"] += work.active.sum(axis=1)
    total["missing_neurons"] += work.missing.sum(axis=1)


COLUMNS = ("token_s", "flash_s", "waiting_s", "cpu_s", "dense_s")
RESULTS = (*COLUMNS, "read_bytes", "active_neurons", "missing_neurons")


def _look_up_times(simulation: LayerSimulation, resident: F64, missing: F64) -> F64:
    """Times [..., columns and bytes per missing neuron] for counts, simulated where they are."""
    pairs = np.stack([resident, missing], axis=-1).reshape(-1, 2)
    unique, where = np.unique(pairs, axis=0, return_inverse=True)
    if len(unique) <= _FEW:
        rows = np.array([_simulate(simulation, float(x), float(y)) for x, y in unique])
        return np.asarray(rows[where.ravel()].reshape(*resident.shape, -1))
    most = simulation.plan.possible
    across, right = _find_cells(resident, most)
    down, below = _find_cells(missing, most)
    total = np.zeros((*resident.shape, len(COLUMNS) + 1))
    for step_x, step_y in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = (right if step_x else 1.0 - right) * (below if step_y else 1.0 - below)
        used = weight > 0.0
        if not used.any():
            continue
        corners = np.stack([across + step_x, down + step_y], axis=-1)[used]
        unique, where = np.unique(corners, axis=0, return_inverse=True)
        counts = [(_count_at(int(x), most), _count_at(int(y), most)) for x, y in unique]
        rows = np.array([_simulate(simulation, *pair) for pair in counts])
        total[used] += weight[used][:, None] * rows[where.ravel()]
    return total


def _simulate(simulation: LayerSimulation, resident: float, missing: float) -> tuple[float, ...]:
    times = simulation.run_ahead(LayerWork(resident=resident, missing=missing))
    meter = times.meter
    return (
        times.duration_s,
        meter.flash_s,
        meter.waiting_s,
        meter.cpu_s,
        meter.dense_s,
        meter.read_bytes / missing if missing else 0.0,
    )


def _count_at(index: int, most: float) -> float:
    """Count at a line of the grid: 0, 1, then powers of the step; ``most`` at most."""
    return min(float(index) if index <= 1 else _STEP ** (index - 1), max(most, 1.0))


def _find_cells(counts: F64, most: float) -> tuple[I64, F64]:
    safe = np.maximum(counts, 1.0)
    index = np.where(counts < 1.0, 0, 1 + np.floor(np.log(safe) / np.log(_STEP) + 1e-9))
    low = np.where(index <= 1, index, _STEP ** np.maximum(index - 1.0, 0.0))
    high = np.where(index < 1, 1.0, _STEP ** np.maximum(index, 0.0))
    high = np.maximum(np.minimum(high, max(most, 1.0)), low + 1e-6)
    share = np.clip((counts - low) / (high - low), 0.0, 1.0)
    return index.astype(np.int64), np.where(share < 1e-9, 0.0, share)


def trace_decode(
    description: Description, *, prompt_tokens: int, tokens: int, seed: int
) -> Recorder:
    random = np.random.default_rng(seed)
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    recorder = Recorder()
    works: dict[int, tuple[LayerSimulation, TokenWork, int]] = {}
    for kind in description.kinds:
        simulation = LayerSimulation(description, kind)
        work = draw_work(description, kind, simulation, shifts, random)
        works |= {layer: (simulation, work, place) for place, layer in enumerate(kind.layers)}
    lanes = [f"{CPU_LANE} thread {number}" for number in range(description.settings.threads)]
    both = [*lanes, DENSE_LANE]
    settings = description.settings
    row_s = settings.batch * description.embedding_s
    for token in range(tokens):
        if row_s > 0.0:
            recorder.add_slice(READ_LANE, "embedding", 0.0, row_s)
            recorder.offset_s += row_s
        position = np.array([float(prompt_tokens + token)])
        for layer in range(description.layers):
            simulation, work, place = works[layer]
            before_s = float(time_before(simulation, position)[0])
            if not simulation.streams:
                for lane in both if settings.attention_share > 0.0 else lanes:
                    recorder.add_slice(lane, "attention", 0.0, before_s)
                recorder.offset_s += before_s
            asked = LayerWork(
                resident=float(work.resident[token, place]),
                missing=float(work.missing[token, place]),
            )
            times = _trace_layer(simulation, asked, before_s, recorder)
            recorder.offset_s += times.duration_s + before_s * simulation.streams
        for lane in both if settings.head_share > 0.0 else lanes:
            recorder.add_slice(lane, f"head, token {token}", 0.0, description.head_s)
        recorder.offset_s += description.head_s
    return recorder


def _trace_layer(
    simulation: LayerSimulation, work: LayerWork, before_s: float, recorder: Recorder
) -> LayerTimes:
    """Record a layer's FFN; reads that begin earlier are one slice, from the attention on."""
    times = simulation.run_ahead(work)
    if simulation.plan.settings.look_ahead != "none" and work.missing > 0:
        ready = replace(work, resident=work.resident + work.missing, missing=0.0)
        simulation.run(ready, recorder)
        recorder.add_slice(READ_LANE, "reads ahead", -before_s, times.meter.flash_s - before_s)
    else:
        simulation.run(work, recorder)
    return times


def simulate_layers(description: Description) -> tuple[float, ...]:
    """Mean seconds in each layer of 64 tokens after a prompt of 64; layers of one kind are
    equal."""
    random, tokens = np.random.default_rng(0), 64
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    positions = tokens + np.arange(tokens, dtype=np.float64)
    times: dict[int, float] = {}
    for kind in description.kinds:
        total = {name: np.zeros(tokens) for name in RESULTS}
        simulation = LayerSimulation(description, kind)
        add_layers(total, simulation, draw_work(description, kind, simulation, shifts, random))
        ffn_s = float(total["token_s"].mean()) / kind.count
        before_s = float(time_before(simulation, positions).mean())
        times |= dict.fromkeys(kind.layers, before_s + ffn_s)
    return tuple(times[number] for number in range(description.layers))
