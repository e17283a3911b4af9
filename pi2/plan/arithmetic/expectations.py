"""What to expect of a token: neurons that are active and not in memory, and how long reads take.

Rough on purpose, from the model's statistics and the device's figures; `pi2 simulate` is finer.
"""

from __future__ import annotations

from pi2.plan.arithmetic.mixers import count_mixer_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model

SKEWED_PART = 0.8
"""Part of the activations that ``sparsity.skew`` speaks of."""


def find_active_share(resolved: ResolvedPlan) -> float | None:
    """Share of a layer's neurons, of its active experts', that a token takes where neurons are
    named; None where nothing is known."""
    plan, model = resolved.plan, resolved.model
    if plan.decode.predictor == "none":
        return None
    if plan.decode.predictor == "router":
        return 1.0
    if resolved.names_by_cutoff:
        layers = resolved.named_layers
        return 1.0 - sum(map(model.find_closed_share, layers)) / len(layers)
    if plan.decode.predictor == "low-rank" and model.predictor is not None:
        if model.predictor.active is not None:
            return model.predictor.active
    return None if model.sparsity is None else model.sparsity.active


def estimate_hot_part(model: Model, hot: float) -> float:
    """Part of the activations that fall on the share ``hot`` of the most used neurons.

    Through the point that ``sparsity.skew`` states, straight before and after it; where it is not
    stated, all neurons are taken for equally busy.
    """
    skew = None if model.sparsity is None else model.sparsity.skew
    if skew is None or not 0 < skew < 1:
        return hot
    if hot <= skew:
        return SKEWED_PART * hot / skew
    return SKEWED_PART + (1 - SKEWED_PART) * (hot - skew) / (1 - skew)


def count_absent(resolved: ResolvedPlan, number: int) -> float | None:
    """Active neurons of the layer ``number`` that are not hot, for one token; None where nothing is
    known."""
    active = find_active_share(resolved)
    if active is None:
        return None
    model, layer = resolved.model, resolved.layers[number]
    computed = model.shape.ffn * model.count_active(number)
    if resolved.plan.decode.predictor == "router":
        # Which neurons of an expert are used often does not matter: it takes them all, or those
        # that thresholds leave of it.
        return active * computed * (1 - layer.hot)
    return active * computed * (1 - estimate_hot_part(model, layer.hot))


def find_read_rate(device: Device) -> float | None:
    """Highest rate of random reads that the device states, in bytes per second."""
    rates = [float(item.rate) for item in device.storage.reads if item.pattern == "random"]
    return max(rates, default=None)


def find_memory_rate(device: Device) -> float | None:
    """Rate at which the CPU reads memory, in bytes per second."""
    for unit in device.units.values():
        if unit.kind == "cpu" and unit.read_bandwidth is not None:
            return float(unit.read_bandwidth.value)
    memory = device.memory.read_bandwidth
    return None if memory is None else float(memory.value)


def count_attention_bytes(resolved: ResolvedPlan) -> int:
    """Bytes that a layer's attention reads for a token when the context is full."""
    needs, layers = resolved.needs, resolved.model.shape.layers
    return count_mixer_bytes(resolved.model) + (needs.kv.bytes + needs.state.bytes) // layers
