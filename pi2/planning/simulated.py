"""Inputs of the simulator for devices that `pi2 probe` measured: its figures instead of constants.

The simulator describes phones by bandwidths, and everything else by constants.  Where pi2's own
kernels and reads were measured, these stand in for both, so that a machine can be simulated, and
what it really does is compared.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import STAGED_NEURONS
from pi2.planning.activity import (
    LayerActivity,
    MergedReads,
    average_chances,
    describe_activity,
    find_statistics,
)
from pi2.planning.cost import read_settings
from pi2.planning.cost_layer import Settings, find_chance, time_norm
from pi2.planning.cost_sizes import measure_sizes
from pi2.planning.counted import CountedHotness
from pi2.planning.rates import Rates, find_stream_overlap, find_stream_rate, read_rates
from pi2.planning.storage_choice import ALONE, Reads
from pi2.simulate import read_inputs as read_plain_inputs
from pi2.simulate.activations import Hotness, find_spread, weigh_hot
from pi2.simulate.flash import Flash, FlashPoint
from pi2.simulate.inputs import Figure, Machine, SimulationInput, Workload

_STEPS = 24
_TYPICAL_MISSES = 128.0
"""Missing neurons of a layer, where nobody counted how often they are used."""


def read_inputs(resolved: ResolvedPlan, rates: Rates | None = None) -> SimulationInput:
    """Inputs of a plan; ``UserError`` P330, P331, P351 names every figure that is missing.

    ``rates``: of a measured device, where they are not to be its document's.
    """
    inputs = read_plain_inputs(resolved)
    cpu = next((unit for unit in resolved.device.units.values() if unit.kind == "cpu"), None)
    if resolved.plan.pipeline.policy != "neuron-cluster":
        return inputs
    if cpu is None or not cpu.kernels:
        return _keep_most_used(inputs) if resolved.plan.cache.policy == "lfu" else inputs
    rates = rates or read_rates(resolved.device, resolved.model.shape.stored_hidden)
    rates = rates.choose(resolved.plan.kv.type, resolved.plan.decode.activations)
    if resolved.plan.decode.predictor == "gate":
        rates = replace(rates, predict=rates.gate, gather=rates.open)
    settings = read_settings(resolved, rates, store=resolved.store_path)
    workload = _measure_workload(resolved, inputs, rates)
    cold = _lose_churn(inputs, workload)
    hot = sum(item.hot * item.count for item in inputs.choices.layers)
    kept = (hot + cold / workload.layer_neurons) / workload.layers
    missing = _count_missing(workload, kept) * workload.layer_neurons or _TYPICAL_MISSES
    if resolved.plan.decode.predictor == "none":
        cold = 0.0  # what does not stay streams by
    choices = replace(
        inputs.choices,
        compute_threads=settings.threads,
        io_threads=1,
        streams_hot=False,  # pi2's engine gathers what is named
        keeps_most_used=resolved.plan.cache.policy == "lfu" and workload.hotness is not None,
        cold_neurons=cold,
    )
    constants = replace(
        inputs.constants,
        gather_efficiency=rates.gather.bytes_s / inputs.machine.cpu_bytes_s,
        barrier_s=_time_steps(resolved, rates, settings, missing)
        / inputs.constants.cluster_barriers,
        place_s=1.0 / rates.look_up.bytes_s,
    )
    kernels = [
        Figure(name=f"kernels ({item.kernel})", status=item.status, source=item.source)
        for item in cpu.kernels
    ]
    merged = ALONE
    if settings.reads is not None and settings.reads.merge_gap is not None:
        merged = _merge_reads(resolved, kept, settings.reads.merge_gap)
    return replace(
        inputs,
        machine=_measure_machine(
            inputs.machine, rates, settings.reads, resolved.bundle.stride, missing, merged
        ),
        workload=workload,
        choices=choices,
        constants=constants,
        figures=(*inputs.figures, *dict.fromkeys(kernels)),
    )


def _time_steps(resolved: ResolvedPlan, rates: Rates, settings: Settings, missing: float) -> float:
    """Fixed parts of a layer's steps, in seconds."""
    mode = resolved.plan.decode.predictor
    sizes = measure_sizes(resolved.model, mode, settings.kv, resolved.bundle)
    seconds = time_norm(rates, sizes, settings) + rates.python_s
    seconds += rates.project.call_s + rates.gather.call_s
    seconds += sizes.predictors * rates.predict.call_s
    if mode == "none" or all(layer.hot >= 1.0 for layer in resolved.layers):
        return seconds
    seconds += rates.look_up.call_s
    if settings.reads is not None:
        seconds += rates.place_s * find_chance(missing) + rates.gather.call_s + rates.wake_s
    return seconds + (rates.find_s if mode == "gate" else 0.0)


def _keep_most_used(inputs: SimulationInput) -> SimulationInput:
    """The policy ``lfu`` of pi2's own cache; the simulator's is that of PowerInfer-2."""
    if not inputs.choices.predicted:
        return inputs
    active, skew = inputs.workload.active, inputs.workload.skew
    hotness = Hotness(active=active, spread=find_spread(active, skew))
    workload = replace(inputs.workload, hotness=hotness)
    cold = _lose_churn(inputs, workload)
    choices = replace(inputs.choices, keeps_most_used=True, cold_neurons=cold)
    return replace(inputs, workload=workload, choices=choices)


def _lose_churn(inputs: SimulationInput, workload: Workload) -> float:
    """Neurons of a cache that holds the most used ones and misses as often as this one, which
    takes some for others."""
    cold = inputs.choices.cold_neurons
    whole = workload.layers * workload.layer_neurons
    hot = sum(item.hot * item.count for item in inputs.choices.layers) / workload.layers
    if workload.hotness is None or hot + cold / whole >= 1.0:
        return cold
    layer = LayerActivity(
        named=workload.hotness, chosen=workload.chosen, neurons=workload.layer_neurons
    )
    missing = layer.count_missing(hot, cold / whole, "lfu") / workload.layer_neurons
    low, high = hot, hot + cold / whole
    for _ in range(_STEPS):
        kept = (low + high) / 2.0
        low, high = (kept, high) if _count_missing(workload, kept) > missing else (low, kept)
    return (low - hot) * whole


def _count_missing(workload: Workload, kept: float) -> float:
    """Share of a layer's neurons that a token misses where the hottest ``kept`` are in memory."""
    if workload.hotness is None:
        return 0.0
    cold = 1.0 - weigh_hot(min(kept, 1.0))
    return float((average_chances(workload.hotness) * cold).mean()) * workload.chosen


def _measure_workload(resolved: ResolvedPlan, inputs: SimulationInput, rates: Rates) -> Workload:
    """Bytes as if everything went at the read bandwidth: each step has a rate of its own."""
    plan, workload = resolved.plan, inputs.workload
    bandwidth = inputs.machine.cpu_bytes_s
    sizes = measure_sizes(resolved.model, plan.decode.predictor, plan.kv.type, resolved.bundle)
    neuron = float(sizes.neuron)
    found = replace(
        workload,
        attention_bytes=workload.attention_bytes * bandwidth / rates.project.bytes_s,
        kv_token_bytes=sizes.kv_token * bandwidth / rates.attend.bytes_s,
        predictor_bytes=sizes.predictor * bandwidth / rates.predict.bytes_s,
        head_bytes=workload.head_bytes * bandwidth / rates.multiply.bytes_s,
    )
    known = find_statistics(resolved.model, resolved.store_path)
    if known is None or plan.decode.predictor == "none":
        return replace(found, neuron_bytes=neuron)
    mode, count = plan.decode.predictor, len(known)
    opened = sum(item.opened(mode) for item in known) / count
    fired = sum(item.fired(mode) for item in known) / count
    if sizes.is_gated:
        neuron *= (1.0 + fired) / 2 if mode == "gate" else (1.0 + opened + fired) / 3
    return replace(
        found,
        neuron_bytes=neuron,
        active=sum(item.named(mode) for item in known) / count,
        skew=sum(item.skew for item in known) / count,
        hotness=_average_hotness(resolved),
    )


def _average_hotness(resolved: ResolvedPlan) -> Hotness | None:
    """Mean of all layers, as the cost model takes them."""
    activity, _ = describe_activity(
        resolved.model, resolved.plan.decode.predictor, resolved.store_path
    )
    if not all(isinstance(layer.named, CountedHotness) for layer in activity):
        named = [layer.named for layer in activity]
        count = len(named)
        return Hotness(
            active=sum(item.active for item in named) / count,
            spread=sum(item.spread for item in named) / count,
        )
    chances = np.stack([layer.named.compute_chances() for layer in activity]).mean(axis=0)
    return CountedHotness(active=float(chances.mean()), spread=0.0, chances=tuple(chances.tolist()))


def _merge_reads(resolved: ResolvedPlan, kept: float, gap: int) -> MergedReads:
    """What neighbours make of reads, in the mean of all layers."""
    layers, _ = describe_activity(
        resolved.model, resolved.plan.decode.predictor, resolved.store_path
    )
    found = [layer.merge_reads(kept, 0.0, gap) for layer in layers]
    return MergedReads(
        requests=sum(item.requests for item in found) / len(found),
        unwanted=sum(item.unwanted for item in found) / len(found),
    )


def _measure_machine(
    machine: Machine,
    rates: Rates,
    reads: Reads | None,
    stride: int,
    missing: float,
    merged: MergedReads,
) -> Machine:
    """The plan's way to read, as the only rate of random reads."""
    stream_overlap = find_stream_overlap(rates)
    if rates.flash is None:
        return machine
    # Streams are read in pieces of a staging buffer's size, whatever is simulated at a time.
    sequential = FlashPoint(
        pattern="sequential",
        block_bytes=stride,
        rate_bytes_s=find_stream_rate(rates.flash, STAGED_NEURONS * stride),
    )
    if reads is None:
        others = tuple(item for item in rates.flash.points if item.pattern != "sequential")
        flash = replace(rates.flash, points=(*others, sequential), bursts=())
        return replace(
            machine, flash=flash, read_overlap=stream_overlap, stream_overlap=stream_overlap
        )
    call_s, neuron_s = reads.draw_line(missing, merged)
    points = (
        FlashPoint(pattern="random", block_bytes=stride, rate_bytes_s=stride / neuron_s),
        sequential,
    )
    flash = Flash(
        points=points,
        latency_s=call_s,
        reader_penalty=0.0,
        block_bytes=rates.flash.block_bytes,
    )
    return replace(machine, flash=flash, read_overlap=reads.overlap, stream_overlap=stream_overlap)
