"""Token generation: draws what every token asks of every layer, and adds up the layers' times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pi2.arrays import F64, I64
from pi2.simulate.activations import (
    Hotness,
    draw_tokens,
    find_spread,
    unite_hotness,
    weigh_hot,
)
from pi2.simulate.cache import compute_hit_chances
from pi2.simulate.inputs import LayerChoice, SimulationInput
from pi2.simulate.layer import LayerSimulation, LayerTimes
from pi2.simulate.layer_run import CPU_LANE, DENSE_LANE, READ_LANE, LayerWork
from pi2.simulate.paging import find_page_misses
from pi2.tracing import Recorder

Progress = Callable[[float], None]

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
    inputs: SimulationInput,
    *,
    prompt_tokens: int,
    tokens: int,
    seed: int,
    progress: Progress | None = None,
) -> DecodeRun:
    """Generate ``tokens`` after ``prompt_tokens``, in every sequence of the batch."""
    assert tokens > 0, tokens
    random = np.random.default_rng(seed)
    shifts = random.standard_normal(tokens) * inputs.constants.token_variation
    shifts = np.clip(shifts, *(np.array([-4.0, 4.0]) * inputs.constants.token_variation))
    positions = prompt_tokens + np.arange(tokens, dtype=np.float64)
    total = _start_tokens(inputs, positions)
    simulation = LayerSimulation(inputs)
    attention_s = float(compute_attention_s(inputs, positions).mean())
    done = 0
    for choice in inputs.choices.layers:
        works = draw_work(inputs, choice, shifts, random)
        add_layers(total, simulation, works, attention_s)
        done += choice.count
        if progress is not None:
            progress(done / inputs.workload.layers)
    return DecodeRun(**total)


def _start_tokens(inputs: SimulationInput, positions: F64) -> dict[str, F64]:
    """What every token costs outside of the FFN: attention, keys and values, output head."""
    workload, machine = inputs.workload, inputs.machine
    layer_s = compute_attention_s(inputs, positions)
    head_s = workload.head_bytes / _find_joint_rate(inputs) + inputs.constants.barrier_s
    total = workload.layers * layer_s + head_s
    zeros = np.zeros_like(total)
    uses_dense = machine.dense_bytes_s is not None
    faults = find_page_misses(inputs)
    stalled = faults.attention_bytes * LayerSimulation(inputs).costs.fault_byte_s
    stalled += inputs.choices.embedding_s
    return {
        "token_s": total + stalled,
        "flash_s": zeros + stalled,
        "waiting_s": zeros + stalled,
        "cpu_s": total.copy(),
        "dense_s": total.copy() if uses_dense else zeros.copy(),
        "read_bytes": zeros + faults.attention_bytes,
        "active_neurons": zeros.copy(),
        "missing_neurons": zeros.copy(),
    }


def compute_attention_s(inputs: SimulationInput, positions: F64) -> F64:
    """Time of a layer's attention block for each position: weights, keys and values, barriers."""
    workload, constants = inputs.workload, inputs.constants
    size = workload.attention_bytes + workload.batch * workload.kv_token_bytes * positions
    return size / _find_joint_rate(inputs) + count_barriers(inputs) / 2 * constants.barrier_s


def count_barriers(inputs: SimulationInput) -> float:
    """Barriers of a layer; half of them belong to the attention block."""
    clusters = inputs.choices.policy == "neuron-cluster"
    return inputs.constants.cluster_barriers if clusters else inputs.constants.graph_barriers


def _find_joint_rate(inputs: SimulationInput) -> float:
    """Rate of dense work that is divided between all units that the plan uses."""
    machine = inputs.machine
    return machine.shared_bytes_s if machine.dense_bytes_s is not None else machine.cpu_bytes_s


def make_hotness(inputs: SimulationInput) -> Hotness:
    """How activations are distributed over the neurons of a layer, those of all sequences."""
    workload = inputs.workload
    one = workload.hotness
    if one is None:
        one = Hotness(active=workload.active, spread=find_spread(workload.active, workload.skew))
    return unite_hotness(one, workload.batch, workload.chosen)


def find_hit_chances(inputs: SimulationInput, choice: LayerChoice) -> F64:
    """Chance per class of neurons that an active cold one is in the cache."""
    workload, constants = inputs.workload, inputs.constants
    if inputs.choices.keeps_most_used:
        kept, hot = choice.hot + find_cold_share(inputs, choice), weigh_hot(choice.hot)
        left = np.maximum(1.0 - hot, 1e-12)
        return np.clip((weigh_hot(min(kept, 1.0)) - hot) / left, 0.0, 1.0)
    return compute_hit_chances(
        make_hotness(inputs),
        choice.hot,
        find_cold_share(inputs, choice),
        workload.step_chosen,
        constants.token_correlation,
        constants.expert_correlation,
    )


def find_cold_share(inputs: SimulationInput, choice: LayerChoice) -> float:
    """Part of a layer's neurons that its share of the cache holds."""
    workload = inputs.workload
    absent = [(1.0 - item.hot) * item.count for item in inputs.choices.layers]
    if sum(absent) <= 0.0:
        return 0.0
    all_cold = inputs.choices.cold_neurons / workload.layer_neurons
    return min(1.0 - choice.hot, all_cold * (1.0 - choice.hot) / sum(absent))


def find_hot_part(inputs: SimulationInput, choice: LayerChoice) -> float:
    """What the CPU's hot neurons cost, as part of gathering the active ones of them.

    Single neurons reach a part of the bandwidth only.  Where more than that part of some neurons is
    active, their cluster is computed densely, streaming by.
    """
    if inputs.choices.policy != "neuron-cluster" or not inputs.choices.streams_hot:
        return 1.0
    chances = make_hotness(inputs).compute_chances()
    share = weigh_hot(choice.hot) - weigh_hot(min(choice.dense, choice.hot))
    active = float((chances * share).sum())
    if active <= 0.0:
        return 1.0
    gathered = np.minimum(chances, inputs.constants.gather_efficiency)
    return float((gathered * share).sum()) / active


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Neurons per token and layer [tokens, layers], before rounding."""

    dense: float
    """Computed by the dense unit in every layer of every token."""
    cold: float
    """Not hot, active or not, in every layer of every token."""
    resident: F64
    missing: F64
    active: F64
    """Active neurons, wherever they are computed."""


def draw_work(
    inputs: SimulationInput, choice: LayerChoice, shifts: F64, random: np.random.Generator
) -> TokenWork:
    """Draw the work of the layers of one kind."""
    workload, choices = inputs.workload, inputs.choices
    neurons = float(workload.step_neurons)
    shape = (len(shifts), choice.count)
    every = np.full(shape, neurons)
    cold = (1.0 - choice.hot) * neurons
    if choices.policy == "mmap":
        missing = every * find_page_misses(inputs).ffn_share
        return TokenWork(
            dense=0.0, cold=cold, resident=every - missing, missing=missing, active=every
        )
    dense_share = min(choice.dense, choice.hot)
    dense = dense_share * neurons
    if not choices.predicted:
        absent = max(1.0 - choice.hot - find_cold_share(inputs, choice), 0.0)
        missing = every * (absent if absent * neurons >= 1.0 else 0.0)
        return TokenWork(
            dense=dense,
            cold=cold,
            resident=every - dense - missing,
            missing=missing,
            active=every,
        )
    drawn = draw_tokens(
        make_hotness(inputs),
        find_hit_chances(inputs, choice),
        dense_share,
        choice.hot,
        neurons,
        shape=shape,
        variation=inputs.constants.token_variation,
        random=random,
        shifts=shifts,
    )
    return TokenWork(
        dense=dense,
        cold=cold,
        resident=drawn.hot * find_hot_part(inputs, choice) + drawn.cached,
        missing=drawn.missing,
        active=drawn.dense + drawn.hot + drawn.cached + drawn.missing,
    )


def add_layers(
    total: dict[str, F64], simulation: LayerSimulation, work: TokenWork, attention_s: float
) -> None:
    """Add the layers' times to their tokens; ``attention_s``: what reads may begin before.

    A layer's times depend on two counts only.  They are simulated at the points of a grid around
    the counts that occur, and interpolated between them.
    """
    table = _LayerTable(simulation, work.dense, work.cold, attention_s)
    times = table.look_up(work.resident, work.missing)
    for number, name in enumerate(COLUMNS):
        total[name] += times[..., number].sum(axis=1)
    total["read_bytes"] += (times[..., len(COLUMNS)] * work.missing).sum(axis=1)
    total["active_neurons"] += work.active.sum(axis=1)
    total["missing_neurons"] += work.missing.sum(axis=1)


COLUMNS = ("token_s", "flash_s", "waiting_s", "cpu_s", "dense_s")


class _LayerTable:
    """Times of a layer over resident and missing neurons, filled where it is looked at."""

    def __init__(
        self, simulation: LayerSimulation, dense: float, cold: float, attention_s: float
    ) -> None:
        self._simulation, self._dense, self._cold = simulation, dense, cold
        self._attention_s = attention_s

    def look_up(self, resident: F64, missing: F64) -> F64:
        """Return [..., columns and bytes per missing neuron] for counts of the same shape."""
        across, right = _find_cells(resident)
        down, below = _find_cells(missing)
        total = np.zeros((*resident.shape, len(COLUMNS) + 1))
        for step_x, step_y in ((0, 0), (0, 1), (1, 0), (1, 1)):
            weight = (right if step_x else 1.0 - right) * (below if step_y else 1.0 - below)
            used = weight > 0.0
            if not used.any():
                continue
            corners = np.stack([across + step_x, down + step_y], axis=-1)[used]
            unique, where = np.unique(corners, axis=0, return_inverse=True)
            rows = np.array([self._simulate(int(x), int(y)) for x, y in unique])
            total[used] += weight[used][:, None] * rows[where.ravel()]
        return total

    def _simulate(self, across: int, down: int) -> tuple[float, ...]:
        missing = _count_at(down)
        work = LayerWork(
            dense=self._dense, resident=_count_at(across), missing=missing, cold=self._cold
        )
        times = self._simulation.run_ahead(work, self._attention_s)
        meter = times.meter
        return (
            times.duration_s,
            meter.flash_s,
            meter.waiting_s,
            meter.cpu_s,
            meter.dense_s,
            meter.read_bytes / missing if missing else 0.0,
        )


def _count_at(index: int) -> float:
    """Count at a line of the grid: 0, 1, then powers of the step."""
    return float(index) if index <= 1 else _STEP ** (index - 1)


def _find_cells(counts: F64) -> tuple[I64, F64]:
    """The grid line at or below each count, and how far it is on the way to the next."""
    safe = np.maximum(counts, 1.0)
    index = np.where(counts < 1.0, 0, 1 + np.floor(np.log(safe) / np.log(_STEP) + 1e-9))
    low = np.where(index <= 1, index, _STEP ** np.maximum(index - 1.0, 0.0))
    high = np.where(index < 1, 1.0, _STEP ** np.maximum(index, 0.0))
    share = np.clip((counts - low) / (high - low), 0.0, 1.0)
    return index.astype(np.int64), np.where(share < 1e-9, 0.0, share)


def trace_decode(
    inputs: SimulationInput, *, prompt_tokens: int, tokens: int, seed: int
) -> Recorder:
    """Simulate a few tokens layer after layer, and record what every lane does."""
    random = np.random.default_rng(seed)
    shifts = random.standard_normal(tokens) * inputs.constants.token_variation
    recorder = Recorder()
    simulation = LayerSimulation(inputs)
    works = [
        (choice, draw_work(inputs, choice, shifts, random)) for choice in inputs.choices.layers
    ]
    lanes = [f"{CPU_LANE} thread {number}" for number in range(inputs.choices.compute_threads)]
    if inputs.machine.dense_bytes_s is not None:
        lanes.append(DENSE_LANE)
    head_s = inputs.workload.head_bytes / _find_joint_rate(inputs)
    row_s = inputs.choices.embedding_s
    for token in range(tokens):
        if row_s > 0.0:
            recorder.add_slice(READ_LANE, "embedding", 0.0, row_s)
            recorder.offset_s += row_s
        attention_s = float(
            compute_attention_s(inputs, np.array([float(prompt_tokens + token)]))[0]
        )
        for choice, work in works:
            for layer in range(choice.count):
                for lane in lanes:
                    recorder.add_slice(lane, "attention", 0.0, attention_s)
                recorder.offset_s += attention_s
                asked = LayerWork(
                    dense=work.dense,
                    resident=float(work.resident[token, layer]),
                    missing=float(work.missing[token, layer]),
                    cold=work.cold,
                )
                times = _trace_layer(simulation, asked, attention_s, recorder)
                recorder.offset_s += times.duration_s
        for lane in lanes:
            recorder.add_slice(lane, f"head, token {token}", 0.0, head_s)
        recorder.offset_s += head_s
    return recorder


def _trace_layer(
    simulation: LayerSimulation, work: LayerWork, attention_s: float, recorder: Recorder
) -> LayerTimes:
    """Record a layer's FFN; reads that begin earlier are one slice, from the attention on."""
    times = simulation.run_ahead(work, attention_s)
    if simulation.looks_ahead and work.missing > 0:
        ready = replace(work, resident=work.resident + work.missing, missing=0.0)
        simulation.run(ready, recorder)
        recorder.add_slice(
            READ_LANE, "reads ahead", -attention_s, times.meter.flash_s - attention_s
        )
    else:
        simulation.run(work, recorder)
    return times
