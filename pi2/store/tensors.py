"""Which dense tensors a model's neuron store holds, in their order in the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pi2.formats import Packing, find_packing, name_packings
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import AttentionPrecision
from pi2.plan.weights.projections import (
    EMBEDDING,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    GATE_CUTOFF,
    HEAD,
    HEAD_BIAS,
    LAYER_EMBEDDING,
    LAYER_PROJECTION_NORM,
    POSITIONS,
    find_cutoff_precision,
    list_altup_floats,
    list_cutoff_matrices,
    list_laurel_matrices,
    list_layer_embedding_matrices,
    list_layer_input_matrices,
    list_projection_vectors,
    list_projections,
    list_routing_vectors,
    list_side_matrices,
    list_stream_matrices,
    name_layer_tensor,
    name_mixer_norm,
    name_state_tensor,
)
from pi2.plan.weights.states import StateShape, describe_state, list_state_tensors

if TYPE_CHECKING:
    from pi2.backends.protocol import Tensor


_PARTS = (
    "shape",
    "norm",
    "rope",
    "other_rope",
    "other_heads",
    "positions",
    "attention",
    "layers",
    "recurrence",
    "convolution",
    "residual",
    "ffn",
    "moe",
    "side_ffn",
    "layer_embedding",
    "altup",
    "multipliers",
    "layer_scale",
    "logit_softcap",
    "tied_head",
    "head_bias",
    "quantization",
)
_OLDEST = {
    "shape": ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "context"),
    "norm": ("kind", "epsilon"),
    "rope": (
        *("kind", "theta", "factor", "low_frequency_factor", "high_frequency_factor"),
        "original_context",
    ),
    "other_heads": ("layers", "heads", "kv_heads", "head_dim", "keys_are_values"),
    "positions": ("offset",),
    "attention": ("qkv_bias",),
    "layers": ("kinds",),
    "recurrence": (
        *("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "convolution_bias"),
        *("projection_bias", "norm_groups", "shortest_step", "longest_step"),
    ),
    "convolution": ("width", "kernel", "bias"),
    "ffn": ("activation", "threshold"),
    "moe": ("experts", "active_experts", "router", "router_input", "normalise_weights"),
    "side_ffn": ("width", "norms"),
    "layer_embedding": ("width", "vocab", "factor", "projection_factor"),
    "altup": ("streams", "laurel_rank", "scaled"),
    "multipliers": (),
    "quantization": ("ffn", "attention", "embedding", "head", "predictor"),
}
"""Options of the first stores that had a table, which are always described; others where they are
used, so that stores stay readable."""


def describe_weights(model: Model) -> dict[str, Any]:
    """Return those parts as plain JSON values: shape, operators, precisions, predictor rank.

    What is absent from the document is left out, so that an option which a later pi2 adds does
    not change the digest of models that do not use it.
    """
    parts = model.model_dump(mode="json", include=set(_PARTS), exclude_none=True)
    if model.other_rope is not None:
        parts["other_rope"] = model.other_rope.model_dump(mode="json", exclude_defaults=True)
    for table, oldest in _OLDEST.items():
        if table not in parts:
            continue
        fields = type(getattr(model, table)).model_fields
        for option in [option for option in parts[table] if option not in oldest]:
            if parts[table][option] in (fields[option].default, []):
                del parts[table][option]
        if not parts[table]:
            del parts[table]
    if model.residual == "sequential":
        del parts["residual"]
    for option in ("head_bias", "layer_scale"):
        if not parts[option]:
            del parts[option]
    if model.predictor is not None:
        parts["predictor"] = {"rank": model.predictor.rank}
    return parts


def compute_digest(parts: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the canonical JSON of ``parts``."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def identify_weights(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, of what tells a model from others of its shape: the float32 tensors of a
    store (norms, biases, routers), which neither rounding nor the order or distance of neurons
    changes; those of predictors, which may be trained again, are left out."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.precision is None and "predictor" not in name:
            digest.update(name.encode() + b"\0")
            digest.update(tensor.weights.tobytes())
    return digest.hexdigest()


def list_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say where two descriptions differ: ``"shape.ffn is 1024 in the store, 2048 in ..."``."""
    left, right = dict(_flatten(stored)), dict(_flatten(wanted))
    return [
        f"{key} is {_show(left, key)} in the store, {_show(right, key)} in the model document"
        for key in dict.fromkeys([*left, *right])
        if left.get(key, _ABSENT) != right.get(key, _ABSENT)
    ]


_ABSENT = object()


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _show(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


if TYPE_CHECKING:
    StoredPrecision = str
else:
    StoredPrecision = Literal[(*name_packings("projections"), *name_packings("vectors"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """A dense tensor of ``rows`` vectors of ``length`` elements."""

    name: str
    precision: StoredPrecision
    rows: int
    length: int

    @property
    def packing(self) -> Packing:
        return find_packing(self.precision)

    @property
    def row_weight_bytes(self) -> int:
        return self.packing.count_weight_bytes(self.length)

    @property
    def row_scale_bytes(self) -> int:
        return self.packing.count_scale_bytes(self.length)


def list_tensors(model: Model, ranks: Sequence[int] | None) -> list[DenseTensor]:
    """List the dense tensors of ``model``; ``ranks`` of its predictors by layer, None without."""
    shape, precision = model.shape, model.quantization
    state = describe_state(model)
    outputs = model.norm.outputs
    tensors = [_quantized(EMBEDDING, precision.embedding, shape.vocab, shape.stored_hidden)]
    if model.positions is not None:
        tensors.append(_quantized(POSITIONS, "fp16", shape.context, shape.stored_hidden))
    for key, size in list_layer_embedding_matrices(model).items():
        kind = precision.embedding if key == LAYER_EMBEDDING else precision.attention
        tensors.append(_quantized(key, kind, *size))
    if model.layer_embedding is not None:
        tensors.append(_vector(LAYER_PROJECTION_NORM, model.layer_embedding.stored_width))
    for key, size in list_stream_matrices(model).items():
        tensors.append(_quantized(key, precision.attention, *size))
    cutoffs = list_cutoff_matrices(model)
    for layer in range(shape.layers):

        def name(kind: str, layer: int = layer) -> str:
            return name_layer_tensor(layer, kind)

        for number, mixer in enumerate(model.list_mixers(layer)):
            if model.norm.inputs:
                tensors.append(_vector(name(name_mixer_norm(number)), shape.stored_hidden))
            if model.norm.inputs and model.norm.bias:
                tensors.append(_vector(name("attention_norm_bias"), shape.stored_hidden))
            if state is not None and mixer != "attention":
                tensors += _list_state(model, state, layer, number)
            else:
                tensors += _list_attention(model.view_layer(layer), layer)
        tensors += [_vector(name("attention_output_norm"), shape.stored_hidden)] if outputs else []
        if model.norm.inputs:
            tensors.append(_vector(name("ffn_norm"), shape.stored_hidden))
        if model.norm.inputs and model.norm.bias:
            tensors.append(_vector(name("ffn_norm_bias"), shape.stored_hidden))
        if model.ffn.bias:
            rows, length = model.expert_count, shape.stored_hidden
            tensors.append(
                DenseTensor(name=name("down_bias"), precision="fp32", rows=rows, length=length)
            )
        tensors += [_vector(name("ffn_output_norm"), shape.stored_hidden)] if outputs else []
        tensors += [_vector(name("layer_scale"), 1)] if model.layer_scale else []
        for key, size in list_layer_input_matrices(model).items():
            tensors.append(_quantized(name(key), precision.attention, *size))
        if model.layer_embedding is not None:
            tensors.append(_vector(name("layer_input_norm"), shape.stored_hidden))
        for key, size in list_laurel_matrices(model).items():
            tensors.append(_quantized(name(key), precision.attention, *size))
        for key, (rows, length) in list_altup_floats(model).items():
            tensors.append(DenseTensor(name=name(key), precision="fp32", rows=rows, length=length))
        if layer in cutoffs:
            own = find_cutoff_precision(model)
            tensors.append(_quantized(name(GATE_CUTOFF), own, *cutoffs[layer]))
        if model.moe is not None and model.has_router(layer):
            rows, length = model.moe.experts, shape.stored_hidden
            tensors.append(
                DenseTensor(name=name("router"), precision="fp32", rows=rows, length=length)
            )
            if model.moe.router_bias:
                tensors.append(_vector(name("router_bias"), rows))
            if model.moe.choice_bias:
                tensors.append(_vector(name("choice_bias"), rows))
            if model.moe.shared_gate:
                tensors.append(_vector(name("shared_router"), shape.stored_hidden))
        tensors += [_vector(name(kind), size) for kind, size in list_routing_vectors(model).items()]
        tensors += [
            _quantized(name(kind), precision.attention, *size)
            for kind, size in list_side_matrices(model).items()
        ]
        if ranks is not None:
            rank, kind, neurons = ranks[layer], precision.predictor, model.layer_neurons
            rows = rank * model.expert_count
            tensors.append(_quantized(name("predictor_in"), kind, rows, model.stored_neuron_width))
            tensors.append(_quantized(name("predictor_out"), kind, neurons, rank))
            tensors.append(_vector(name("predictor_bias"), neurons))
    tensors.append(_vector(FINAL_NORM, shape.stored_hidden))
    if model.norm.bias:
        tensors.append(_vector(FINAL_NORM_BIAS, shape.stored_hidden))
    if not model.tied_head:
        tensors.append(_quantized(HEAD, precision.head, shape.vocab, shape.stored_hidden))
    if model.head_bias:
        tensors.append(_vector(HEAD_BIAS, shape.vocab))
    return tensors


def _list_attention(model: Model, layer: int) -> list[DenseTensor]:
    precision = model.quantization.attention

    def name(kind: str) -> str:
        return name_layer_tensor(layer, kind)

    matrices, vectors = list_projections(model), dict(list_projection_vectors(model))
    tensors = [_quantized(name("qkv"), precision, *matrices["qkv"])]
    # What the first stores had lies where they had it.
    last = {key: vectors.pop(key) for key in ("output_bias",) if key in vectors}
    tensors += [_vector(name(key), length) for key, length in vectors.items()]
    others = [kind for kind in matrices if kind != "qkv"]
    tensors += [_quantized(name(kind), precision, *matrices[kind]) for kind in others]
    return tensors + [_vector(name(key), length) for key, length in last.items()]


def _list_state(model: Model, state: StateShape, layer: int, mixer: int) -> list[DenseTensor]:
    return [
        DenseTensor(
            name=name_state_tensor(layer, mixer, tensor.kind),
            precision=tensor.precision or "fp32",
            rows=tensor.rows,
            length=tensor.length,
        )
        for tensor in list_state_tensors(model, state)
    ]


def _quantized(name: str, precision: AttentionPrecision, rows: int, length: int) -> DenseTensor:
    return DenseTensor(name=name, precision=precision, rows=rows, length=length)


def _vector(name: str, length: int) -> DenseTensor:
    return DenseTensor(name=name, precision="fp32", rows=1, length=length)
