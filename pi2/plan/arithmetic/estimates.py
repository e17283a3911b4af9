"""What a value of a plan costs: the bytes of the segments that it has a part in."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from pi2.plan.arithmetic.resolved import DenseShare, ResolvedLayer, ResolvedPlan
from pi2.plan.arithmetic.sizes import TOKENS_TOGETHER
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model

_NAMED = {"none": "all of", "router": "the chosen experts' neurons among"}
"""The sparse unit's part of the remaining neurons, if no neuron is predicted."""


def describe_owners(resolved: ResolvedPlan, layer: ResolvedLayer) -> Iterator[str]:
    """The share of each unit in a layer that several units compute, a line for each; nothing if
    only the sparse unit computes it."""
    dense = layer.dense
    if dense is None:
        return
    kept = "which it keeps"
    if dense.least < dense.kept:
        kept = f"and keeps {name_range(range(dense.kept))}"
    memory = name_memory(resolved, dense.unit)
    yield f"{dense.unit} computes {describe_computed(dense)}, {kept} in {memory}"
    others = range(dense.least, resolved.model.layer_neurons)
    named = _NAMED.get(resolved.plan.decode.predictor, "the predicted neurons among")
    sparse = f"{resolved.sparse_unit} computes {named} the others"
    if not others:
        yield f"{resolved.sparse_unit} computes none of its neurons"
    elif layer.own_hot:
        yield f"{sparse}; {name_range(layer.own_hot)} stay in memory.segments.hot"
    else:
        yield f"{sparse}; none of them stays in memory"


def describe_computed(dense: DenseShare) -> str:
    """Neurons that a dense unit computes in steps of 1, 2, ... sequences."""
    parts = []
    for count, group in groupby(enumerate(dense.by_sequences, 1), key=lambda item: item[1]):
        steps = [number for number, _ in group]
        parts.append((name_range(range(count)), steps))
    if len(parts) == 1:
        return parts[0][0]
    return ", ".join(f"{neurons} in steps of {_name_steps(steps)}" for neurons, steps in parts)


def _name_steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"{steps[0]} sequence{'s' if steps[0] > 1 else ''}"
    return f"{steps[0]} to {steps[-1]} sequences"


def name_range(neurons: range) -> str:
    """Neurons by their stored indices: ``neurons 0-306``."""
    if len(neurons) <= 1:
        return f"neuron {neurons.start}" if neurons else "no neurons"
    return f"neurons {neurons.start}-{neurons.stop - 1}"


def name_memory(resolved: ResolvedPlan, unit: str) -> str:
    """Place of a dense unit's neurons: ``memory.units.gpu, its own memory``."""
    if unit not in resolved.device.units:
        return "memory"
    if not resolved.shares_main_memory(unit):
        return f"memory.units.{unit}, its own memory"
    segment = resolved.name_segment(unit)
    return "memory.segments.hot" if segment == "hot" else f"memory.{segment}, main memory"


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
        closed = [model.blocks[layer].ffn.closed for layer in resolved.named_layers]
        return 1.0 - sum(closed) / len(closed)
    if plan.decode.predictor == "low-rank" and model.predictor is not None:
        if model.predictor.active is not None:
            return model.predictor.active
    return None if model.sparsity is None else model.sparsity.active


def estimate_hot_part(model: Model, hot: float) -> float:
    """Share of activations on the ``hot`` most used neurons, piecewise linear through
    ``sparsity.skew``."""
    skew = None if model.sparsity is None else model.sparsity.skew
    if skew is None or not 0 < skew < 1:
        return hot
    if hot <= skew:
        return SKEWED_PART * hot / skew
    return SKEWED_PART + (1 - SKEWED_PART) * (hot - skew) / (1 - skew)


def count_absent(resolved: ResolvedPlan, number: int) -> float | None:
    """Active neurons of layer ``number`` that are not hot, for one token; None if unknown."""
    active = find_active_share(resolved)
    if active is None:
        return None
    model, layer = resolved.model, resolved.layers[number]
    computed = model.shape.ffn * model.blocks[number].ffn.active
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


SHORT_CHUNK, USUAL_CHUNK, LONG_CHUNK = 32, 128, TOKENS_TOGETHER
"""Tokens."""
EXPERT_TOKENS = 32
"""Tokens of an expert beyond which unpacking its weights is a small part of computing them."""


def list_chunks(model: Model, context: int) -> tuple[int, ...]:
    """Numbers of tokens of a chunk that plans for ``model`` should choose from, ascending and at
    most the tokens of ``context``."""
    chunks = [SHORT_CHUNK, USUAL_CHUNK]
    moe = model.moe
    if moe is not None:
        share = (moe.active_experts + moe.shared_experts) / (moe.experts + moe.shared_experts)
        if USUAL_CHUNK * share < EXPERT_TOKENS:
            chunks.append(LONG_CHUNK)
    return tuple(dict.fromkeys(min(chunk, context) for chunk in chunks))


USUAL_BYTES = 512 << 10
"""If nothing is known of the storage."""
LEAST_BYTES, MOST_BYTES = 128 << 10, 1 << 20
"""Smaller ones cost more processor time; larger ones let the first neurons come late."""
NEARLY = 0.95
"""Part of the highest rate that a smaller request should reach."""


def choose_request_bytes(device: Device) -> int:
    """The smallest block, of the random reads that the device states, with nearly the highest
    rate."""
    rates: dict[int, float] = {}
    for read in device.storage.reads:
        if read.pattern == "random" and LEAST_BYTES <= read.block <= MOST_BYTES:
            rates[read.block] = max(read.rate, rates.get(read.block, 0.0))
    most = max(rates.values(), default=0.0)
    return min((size for size, rate in rates.items() if rate >= NEARLY * most), default=USUAL_BYTES)
