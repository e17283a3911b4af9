"""A store's statement of its model: parts of the document, their digest, its weights'."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Tensor

_OTHERS = frozenset(
    {
        *("schema_version", "id", "name", "description", "licence", "extends", "inherit", "remove"),
        *("pooling", "tokenizer", "tensors", "predictor", "sparsity", "sampling"),
    }
)
"""Keys of a model that change no weights of a store."""
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
used: stores stay readable."""


def describe_weights(model: Model) -> dict[str, Any]:
    """Return those parts as plain JSON values: shape, operators, precisions, predictor rank.

    Keys that are absent from the document are left out: an option that a later pi2 adds does not
    change the digest of models that do not use it."""
    kept = set(type(model).model_fields) - _OTHERS
    parts = model.model_dump(mode="json", include=kept, exclude_none=True)
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
    for option in ("head_bias", "layer_scale", "operators"):
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
    changes; predictors, which may be trained again, are left out."""
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
