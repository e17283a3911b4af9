"""What a model computes beyond the plainest transformer, by the keys of its document; backends
declare what they compute, and what they cannot compute is the difference."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model

_SILENT = frozenset(
    {
        *("schema_version", "id", "name", "description", "licence", "extends", "inherit", "remove"),
        *("shape", "tied_head", "pooling", "tokenizer", "quantization", "tensors", "predictor"),
        *("sparsity", "sampling", "norm.epsilon", "norm.weights", "norm.weight_offset"),
        *("layers", "attention.latent.epsilon", "rope"),
    }
)
"""Keys that no kernel has to know."""


def list_options(model: Model) -> list[str]:
    """Keys that change what is computed, where they are not at their defaults, such as
    ``attention.softcap`` and ``moe.router = "sigmoid"``; ``layers.kinds = "+"`` stands for layers
    of several mixers."""
    kinds = () if model.layers is None else model.layers.kinds
    parts = dict.fromkeys(part for kind in kinds for part in kind.split("+"))
    found = [f'layers.kinds = "{part}"' for part in parts if part != "attention"]
    found += ['layers.kinds = "+"'] if any("+" in kind for kind in kinds) else []
    ropes = [rope for rope in (model.rope, model.other_rope) if rope is not None]
    for key in ("kind", "pairs"):
        words = dict.fromkeys(getattr(rope, key) for rope in ropes)
        default = type(model.rope).model_fields[key].default
        found += [f'rope.{key} = "{word}"' for word in words if word != default]
    if model.other_rope is not None:
        found.append("other_rope")
    return found + list(_list_changes(model, ""))


def _list_changes(table: Any, prefix: str) -> Iterator[str]:
    for name, field in type(table).model_fields.items():
        key, value = prefix + name, getattr(table, name)
        if key in _SILENT or key == "other_rope":
            continue
        if hasattr(type(value), "model_fields"):
            if field.default is None:
                yield key
            yield from _list_changes(value, f"{key}.")
        elif isinstance(value, dict):
            yield from (f"{key}.{own}" for own in value)
        elif isinstance(value, str) and value != field.default:
            yield f'{key} = "{value}"'
        elif not isinstance(value, str) and not field.is_required() and value != field.default:
            yield key


def read_options(text: str) -> frozenset[str]:
    """Options that a backend declares: lines of ``table: key key=word``; ``.`` is the table."""
    found = []
    for line in text.strip().splitlines():
        table, _, keys = line.strip().partition(":")
        for item in keys.split():
            key, _, word = item.partition("=")
            name = table if key == "." else f"{table}.{key}" if table else key
            found.append(f'{name} = "{word}"' if word else name)
    return frozenset(found)


def find_unknown(
    model: Model, computed: Collection[str], apart: Collection[tuple[str, str]] = ()
) -> list[str]:
    """Options of a model that are not ``computed``, of an unknown table the table only; or not both
    of those that are ``apart``."""
    options = list_options(model)
    found = [option for option in options if option not in computed]
    found = [key for key in found if key.rpartition(".")[0] not in found]
    pairs = (pair for pair in apart if set(pair) <= set(options))
    return found + [f"{first} with {second}" for first, second in pairs]
