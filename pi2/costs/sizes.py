"""Bytes and weights that a layer reads for a token: from the model's shape and precisions."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path

from pi2.costs.activity import PredictorMode
from pi2.diagnostics import UserError
from pi2.plan.arithmetic.units import (
    count_kv_token_bytes,
    count_mixer_bytes,
    count_mixer_weights,
    count_state_traffic,
)
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import BundleLayout, ScalesPlace, matrix_bytes, weight_bytes
from pi2.store.manifest import Order, read_manifest

PAGE_BYTES = 4096
"""Least number of bytes that flash reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayout:
    """Bundle layout of an existing neuron store."""

    stride: int
    order: Order
    scales: ScalesPlace = "inline"


def read_stored(store: Path | None) -> StoredLayout | None:
    """Layout of a store; None where there is none, or one that cannot be read."""
    if store is None:
        return None
    try:
        manifest = read_manifest(store)
    except UserError:
        return None
    return StoredLayout(
        stride=manifest.bundle.stride, order=manifest.order, scales=manifest.bundle.scales
    )


def find_range_bytes(model: Model, stride: int, store: Path | None = None) -> int:
    """Range of the file that a token's reads span: a layer, or an expert's neurons if stored so."""
    stored = read_stored(store) if model.moe is not None else None
    apart = stored is not None and stored.order != "expert"
    return (model.layer_neurons if apart else model.shape.ffn) * stride


def find_touched_bytes(stride: int) -> float:
    """Mean bytes of the pages that a neuron's read touches, over all neurons of a layer."""
    step = gcd(stride, PAGE_BYTES)
    count = PAGE_BYTES // step
    pages = sum(-(-(start * step + stride) // PAGE_BYTES) for start in range(count))
    return pages * PAGE_BYTES / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a layer reads for a token."""

    projections: int
    kv_token: float
    predictor: float
    predictors: int
    """Calls that find active neurons: one for each active expert."""
    experts: int
    """Experts that a router chooses among; 0 without."""
    neuron: int
    """Weights and scales of a neuron that is computed."""
    dense_neuron: int
    """Weights of a neuron on an NPU, which has one scale for a whole row."""
    whole_neuron: int
    """Weights and scales of a neuron as the store has them."""
    stride: int
    head: int
    head_weights: int
    predictor_weights: int
    neuron_weights: int
    projection_weights: int
    """Number of weights of attention and of an FFN beside experts, for arithmetic."""
    hidden: int
    is_gated: bool


def measure_sizes(model: Model, mode: PredictorMode, kv: KvType, bundle: BundleLayout) -> Sizes:
    """Bytes of a layer: of its active experts, where it has experts."""
    shape, precision, width = model.shape, model.quantization, model.stored_neuron_width
    active = model.token_neurons / (shape.layers * shape.ffn)
    projections = count_mixer_bytes(model) + count_state_traffic(model)
    neuron = bundle.neuron_bytes
    predictor, predictor_weights = 0.0, 0
    if mode == "gate":
        predictor = active * matrix_bytes(shape.ffn, width, precision.ffn)
        predictor_weights = round(active * shape.ffn * width)
        neuron -= neuron // len(bundle.parts)  # gates are known then
    elif mode == "low-rank" and model.predictor is not None:
        rank = model.predictor.rank
        predictor = matrix_bytes(rank, width, precision.predictor)
        predictor += matrix_bytes(shape.ffn, rank, precision.predictor)
        predictor *= active
        predictor_weights = round(active * rank * (width + shape.ffn))
    head = precision.embedding if model.tied_head else precision.head
    return Sizes(
        projections=projections,
        kv_token=count_kv_token_bytes(model, kv),
        predictor=predictor,
        predictors=round(active) if predictor else 0,
        experts=0 if model.moe is None else model.moe.experts,
        neuron=neuron,
        whole_neuron=bundle.neuron_bytes,
        dense_neuron=len(bundle.parts) * weight_bytes(width, precision.ffn),
        stride=bundle.stride,
        head=matrix_bytes(shape.vocab, shape.stored_hidden, head),
        head_weights=shape.vocab * shape.stored_hidden,
        predictor_weights=predictor_weights,
        neuron_weights=len(bundle.parts) * width,
        projection_weights=count_mixer_weights(model),
        hidden=shape.stored_hidden,
        is_gated=bundle.is_gated,
    )
