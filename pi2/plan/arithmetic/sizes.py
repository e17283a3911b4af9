"""Bytes that a plan's segments need, from the model's shape and quantisation, and what a value of
the plan costs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

from pi2.model.blocks import list_attention
from pi2.model.ffn import list_predictor_tensors
from pi2.model.tensor import (
    EMBEDDING,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    HEAD,
    HEAD_BIAS,
    LAYER_EMBEDDING,
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    POSITIONS,
    Place,
)
from pi2.plan.arithmetic.units import Need
from pi2.plan.documents.plan_units import list_cores
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import ALIGNMENT, align_bytes, round_up, scale_bytes, weight_bytes

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import DenseShare, ResolvedLayer, ResolvedPlan
    from pi2.plan.documents.device import Device
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import Plan

STAGED_NEURONS = 512
"""Most neurons in one staging buffer of the prefill."""
MOST_PIECE_BYTES = 4 << 20
"""Most bytes of a piece of a layer or an expert that is read and computed as a whole."""
STAGING_BUFFERS = 2
"""Staging buffers: one is read into while the other is computed with."""
MIN_COLD_NEURONS = 64
"""Fewest cold neurons that a layer's decode step can work with."""
TOKENS_TOGETHER = 512
"""Most tokens of a prompt that go through a layer before the next, with ``layers-first``."""
PART_NEURONS = 256
"""Predicted neurons that are computed together if the content of memory changes no bit: enough to
hide one call's fixed time, and few enough to be computed while others are read."""
LOGIT_ROWS = 16
"""Most tokens whose logits are computed at once: a whole chunk's would take much memory."""
PIECE_BYTES = 4 << 20
"""A piece of a dense tensor on its way to a unit that has the whole model."""
TENSOR_ROWS = 32
"""Rows that such pieces are whole numbers of."""
DEFAULT_BLOCK_BYTES = 512
"""Block of a device that states none: the smallest that drives have."""
UNKNOWN_ACTIVE = 0.25
"""Share of active neurons that is assumed of a model that states none."""


def count_piece_bytes(resolved: ResolvedPlan) -> int:
    """Bytes of the buffer that dense tensors are read into in pieces: 4 MiB, or what 32 rows of
    any of them take."""
    shape, moe = resolved.model.shape, resolved.model.moe
    queries = (attention.stored_query for attention, _ in list_attention(resolved.model))
    widest = max(shape.stored_hidden, *queries)
    single = max(shape.vocab, resolved.model.layer_neurons)
    routers = 0 if moe is None else moe.experts * shape.stored_hidden
    return max(PIECE_BYTES, 4 * max(TENSOR_ROWS * widest, single, routers) + 2 * ALIGNMENT)


_PARTS = {
    EMBEDDING: "embedding",
    POSITIONS: "positions",
    HEAD: "head",
    HEAD_BIAS: "head",
    **dict.fromkeys((LAYER_EMBEDDING, LAYER_PROJECTION, LAYER_PROJECTION_NORM), "own"),
    **dict.fromkeys((FINAL_NORM, FINAL_NORM_BIAS), "end"),
}
"""What explanations call tensors of the whole model; others are of layers."""


def need_attention(resolved: ResolvedPlan) -> Need:
    """All dense tensors but predictors; the rows of a chunk if embeddings are read from flash; and
    the scales of all neurons if they are resident."""
    plan, model = resolved.plan, resolved.model
    layers, sizes = model.shape.layers, dict.fromkeys([*_PARTS.values(), "layers"], 0)
    for tensor in model.dense_tensors:
        size = tensor.size_bytes
        is_read = tensor.name == EMBEDDING and reads_embedding(plan, model)
        if is_read or tensor.name == LAYER_EMBEDDING:
            row = tensor.row_weight_bytes + tensor.row_scale_bytes
            size = align_bytes(count_chunk_tokens(plan) * row)
        sizes[_PARTS.get(tensor.name, "layers")] += size
    scales = layers * align_bytes(model.layer_neurons * resolved.bundle.scales_stride)
    parts = {
        "embeddings of layers": sizes["own"],
        "positions": sizes["positions"],
        "head": sizes["head"],
        "scales of neurons": scales,
    }
    explanations = [
        f"embedding {approximate_bytes(sizes['embedding'])}",
        f"{layers} layers of {approximate_bytes(sizes['layers'] // layers)}",
        *(f"{name} {approximate_bytes(size)}" for name, size in parts.items() if size),
    ]
    return Need(sum(sizes.values()) + scales, ", ".join(explanations))


def count_chunk_tokens(plan: Plan) -> int:
    """Tokens that activations have room for: a chunk's or a step's."""
    return max(plan.prefill.chunk, plan.decode.step_tokens)


def count_stated_threads(resolved: ResolvedPlan) -> int | None:
    """Compute threads that the plan or its device states; None if the machine is to be asked."""
    threads = resolved.plan.threads
    if threads.compute is not None:
        return threads.compute
    unit = resolved.device.units.get(resolved.sparse_unit)
    clusters = () if unit is None else unit.clusters
    return len(list_cores(threads.cores or "")) or sum(item.cores for item in clusters) or None


def reads_embedding(plan: Plan, model: Model) -> bool:
    """Whether a token's row of the embedding is read when the token comes."""
    return plan.memory.embedding == "flash" and not model.tied_head


def count_read_rows(plan: Plan, model: Model) -> int:
    """Rows that are read when a token comes: of embeddings and of n-grams."""
    ngrams = 0 if model.ngrams is None else model.ngrams.count
    return reads_embedding(plan, model) + (model.layer_embedding is not None) + ngrams


def need_predictor(resolved: ResolvedPlan) -> Need:
    """Memory for finding the active neurons.

    low-rank: the predictors' tensors. gate: weights and scales of all gate rows (of the up rows if
    neurons have no gate), and f floats if they have biases; if a cutoff closes gates, only for
    layers with one. low-rank and gate with experts: e f integers, the expert of each
    neuron. Others: nothing."""
    plan, model = resolved.plan, resolved.model
    shape, width = model.shape, model.stored_neuron_width
    if plan.decode.predictor == "gate":
        precision = model.quantization.gates
        layer = align_bytes(model.layer_neurons * weight_bytes(width, precision))
        layer += align_bytes(model.layer_neurons * scale_bytes(width, precision))
        for there in (model.ffn.bias, model.moe is not None):
            layer += align_bytes(4 * model.layer_neurons) if there else 0
        count = len(resolved.named_layers)
        return Need(count * layer, f"gate rows of {count} layers of {approximate_bytes(layer)}")
    if plan.decode.predictor == "low-rank" and model.predictor is not None:
        rank = model.predictor.rank
        layer = sum(own.size_bytes for own in list_predictor_tensors(Place(model, 0), rank))
        if model.moe is not None:
            layer += align_bytes(4 * model.layer_neurons)  # the expert of each neuron
        return Need(
            shape.layers * layer,
            f"predictors of rank {rank}: {shape.layers} layers of {approximate_bytes(layer)}",
        )
    return Need(0, f"nothing, the predictor is {plan.decode.predictor}")


def need_cold(resolved: ResolvedPlan) -> Need:
    """Smallest cache: the neurons that one layer computes for one token, at least 64 of them.

    Of a router all of the chosen experts; else expected actives, from calibrated thresholds, from
    the cutoffs of gates, from the predictor's or the model's statistics, else a quarter of the
    layer; never more than the layer's neurons that are not hot.
    Dense decoding streams through the workspace and needs none."""
    plan, model = resolved.plan, resolved.model
    if plan.decode.predictor == "none":
        return Need(0, "nothing, the predictor is none: cold neurons stream through the workspace")
    known = find_active_share(resolved, max)
    share = UNKNOWN_ACTIVE if known is None else known
    computed = model.shape.ffn * model.most_active
    least = PART_NEURONS if resolved.names_by_cutoff else MIN_COLD_NEURONS
    wanted = max(least, ceil(share * computed))
    absent = max(
        model.layer_neurons - _count_resident(resolved, resolved.layers[layer])
        for layer in resolved.named_layers
    )
    neurons = min(absent, wanted)
    stride = resolved.bundle.stride
    return Need(
        neurons * stride,
        f"{neurons} cold neurons of {stride} bytes: what one layer computes for a token",
    )


def _count_resident(resolved: ResolvedPlan, layer: ResolvedLayer) -> int:
    """Neurons of a layer that are never read while tokens are generated, even if a unit is lost."""
    if layer.dense is not None and resolved.goes_on_without(layer.dense.unit):
        return len(layer.own_hot)
    return layer.hot_neurons


def count_staged_neurons(resolved: ResolvedPlan) -> int:
    """Neurons of one staging buffer: min(f, 512); or a layer, if gates with a cutoff name neurons
    and the content of memory changes no bit."""
    neurons = STAGED_NEURONS
    if resolved.names_by_cutoff:
        most = max(1, MOST_PIECE_BYTES // resolved.bundle.stride)
        return min(resolved.model.layer_neurons, max(neurons, most))
    return min(resolved.model.layer_neurons, neurons)


def count_ffn_bytes(resolved: ResolvedPlan) -> int:
    """Bytes of all neurons in the store: L e f S."""
    model = resolved.model
    return model.shape.layers * model.layer_neurons * resolved.bundle.stride


def find_block_bytes(device: Device) -> int:
    """Bytes of the device's block, a multiple of 512; direct reads are multiples of it."""
    block = device.storage.block_size
    if block is None or block <= 0 or block % DEFAULT_BLOCK_BYTES:
        return DEFAULT_BLOCK_BYTES
    return block


def count_gate_read_bytes(resolved: ResolvedPlan) -> int:
    """Bytes that are read of a missing neuron, in whole blocks, before it is known whether its gate
    is open; 0 if neurons are read whole.

    ``pipeline.phases = 2`` asks for it. Nothing is gained if gates are known (predictor ``gate``),
    if a neuron has none, or if no gate is ever closed; and a bias of the gate comes with the end of
    the neuron."""
    model, plan, bundle = resolved.model, resolved.plan, resolved.bundle
    if plan.pipeline.phases == 1 or plan.decode.predictor != "low-rank":
        return 0
    if not model.ffn.gated or bundle.biases or model.is_smooth:
        return 0
    block = find_block_bytes(resolved.device)
    size = round_up(bundle.first_bytes, block)
    return size if size < round_up(bundle.used_bytes, block) else 0


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


def find_active_share(
    resolved: ResolvedPlan,
    choose: Callable[[Sequence[float]], float] = lambda shares: sum(shares) / len(shares),
) -> float | None:
    """Share of a layer's neurons, of its active experts', that a token takes where neurons are
    named, ``choose`` of the layers'; None where nothing is known."""
    plan, model = resolved.plan, resolved.model
    if plan.decode.predictor == "none":
        return None
    if plan.decode.predictor == "router":
        return 1.0
    if plan.decode.predictor == "gate" and resolved.thresholds is not None:
        return choose([layer.computed for layer in resolved.thresholds.layers])
    if resolved.names_by_cutoff:
        return choose([1.0 - model.blocks[layer].ffn.closed for layer in resolved.named_layers])
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
