"""Prompt processing: dense, layer by layer, weights streamed where they are not in memory."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import ceil
from typing import Any

import simpy

from pi2.simulate.decode import find_cold_share
from pi2.simulate.inputs import LayerChoice, SimulationInput
from pi2.simulate.paging import find_page_misses
from pi2.simulate.read_costs import compute_read_costs

_BUFFERS = 2
"""Layers that are in memory at once while layers stream: one is read, one is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRun:
    """Outcome of a simulated prompt."""

    tokens: int
    duration_s: float
    compute_s: float
    flash_s: float
    read_bytes: float

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.duration_s


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer's share of the work: read first, then compute."""

    read_s: float
    read_bytes: float
    compute_s: float


def simulate_prefill(inputs: SimulationInput, tokens: int) -> PrefillRun | None:
    """Process a prompt of ``tokens``; None where the device states no arithmetic rate."""
    assert tokens > 0, tokens
    machine = inputs.machine
    ops_s = machine.dense_ops_s if machine.dense_bytes_s is not None else machine.cpu_ops_s
    if ops_s is None:
        return None
    steps = _list_steps(inputs, tokens, ops_s)
    env = simpy.Environment()
    if inputs.choices.policy == "neuron-cluster":
        env.run(until=env.process(_overlap(env, steps)))
        duration = float(env.now)
    else:
        duration = sum(step.read_s + step.compute_s for step in steps)
    duration += inputs.workload.head_bytes / machine.shared_bytes_s
    return PrefillRun(
        tokens=tokens,
        duration_s=duration,
        compute_s=sum(step.compute_s for step in steps),
        flash_s=sum(step.read_s for step in steps),
        read_bytes=sum(step.read_bytes for step in steps),
    )


def _overlap(env: simpy.Environment, steps: list[_Step]) -> Generator[simpy.Event, Any, None]:
    """One thread reads layers into two buffers, the unit computes them in order."""
    ready = simpy.Store(env, capacity=_BUFFERS - 1)

    def read() -> Generator[simpy.Event, Any, None]:
        for step in steps:
            yield env.timeout(step.read_s)
            yield ready.put(step)

    env.process(read())
    for _ in steps:
        step = yield ready.get()
        yield env.timeout(step.compute_s)


def _list_steps(inputs: SimulationInput, tokens: int, ops_s: float) -> list[_Step]:
    """Work in the plan's order of chunks and layers."""
    choices = inputs.choices
    chunk = min(choices.chunk, tokens)
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    rounds = [[size] for size in sizes] if choices.prefill_order == "chunks-first" else [sizes]
    steps = []
    for group in rounds:
        for choice in choices.layers:
            read = _count_read_bytes(inputs, choice, sum(group))
            compute = sum(_time_chunk(inputs, size, ops_s, read > 0) for size in group)
            # What reading needs of the cores is not there for computing.
            compute += (1.0 - inputs.machine.stream_overlap) * _time_read(inputs, read)
            step = _Step(_time_read(inputs, read), read, compute)
            steps += [step] * choice.count
    if choices.policy == "layer-barrier" and any(step.read_bytes for step in steps):
        head = inputs.workload.head_bytes
        steps.append(_Step(_time_read(inputs, head), head, 0.0))
    return steps


def _count_read_bytes(inputs: SimulationInput, choice: LayerChoice, tokens: int) -> float:
    """Bytes of a layer that a prompt of ``tokens`` reads."""
    workload, choices = inputs.workload, inputs.choices
    touched = 1.0 - (1.0 - workload.chosen) ** tokens
    neurons = workload.layer_neurons * touched
    kept = choice.hot + find_cold_share(inputs, choice)
    if choices.policy == "mmap":
        misses = find_page_misses(inputs)
        share = 1.0 if misses.ffn_share > 0 else 0.0
        return share * neurons * workload.neuron_bytes + misses.attention_bytes / workload.layers
    if kept >= 1.0 - 1e-3:
        return 0.0
    if choices.policy == "layer-barrier":  # a layer is one file: attention is read with it
        return neurons * workload.neuron_bytes + workload.attention_bytes
    if choices.prefill_order == "layers-first":
        return neurons * workload.neuron_bytes
    return neurons * (1.0 - choice.hot) * workload.neuron_bytes


def _time_read(inputs: SimulationInput, size_bytes: float) -> float:
    """Time of one sequential stream; without overlap, what was read is copied as well."""
    if size_bytes <= 0:
        return 0.0
    costs = compute_read_costs(inputs)
    if inputs.choices.policy == "mmap":
        return size_bytes * costs.fault_byte_s
    seconds = costs.latency_s + size_bytes * costs.sequential_byte_s
    if inputs.choices.policy == "layer-barrier":
        seconds += size_bytes / inputs.constants.copy_bytes_s
    return seconds


def _time_chunk(inputs: SimulationInput, tokens: int, ops_s: float, streaming: bool) -> float:
    """Time of a chunk in one layer: arithmetic, but at least one pass over the weights."""
    workload, machine, constants = inputs.workload, inputs.machine, inputs.constants
    ffn_weights = workload.computed_neurons * 3 * workload.hidden
    operations = 2.0 * tokens * (workload.attention_weights + ffn_weights)
    dense = machine.dense_bytes_s is not None
    rate = ops_s * (constants.streaming_compute_share if streaming and dense else 1.0)
    experts = min(workload.experts, ceil(workload.active_experts * tokens))
    neuron = workload.dense_neuron_bytes if dense else workload.neuron_bytes
    size = workload.attention_bytes + experts * workload.ffn * neuron
    bandwidth = machine.dense_bytes_s or machine.cpu_bytes_s
    launch = constants.dense_launch_s if dense else 0.0
    return max(operations / rate, size / bandwidth) + launch
