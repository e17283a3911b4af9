"""Options of a model, which backends declare, and operators that modules of this folder add.

An added operator works at the end of layers.  A module lists it in ``OPERATORS``, a document has
its options in ``operators.NAME``, and backends that do not declare it refuse the model."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import pi2.model
from pi2.model.tensor import DenseTensor, Place

if TYPE_CHECKING:
    from pi2.arrays import F32
    from pi2.plan.documents.model import Model

_SILENT = frozenset(
    {
        *("schema_version", "id", "name", "description", "licence", "extends", "inherit", "remove"),
        *("shape", "tied_head", "pooling", "tokenizer", "quantization", "tensors", "predictor"),
        *("sparsity", "sampling", "norm.epsilon", "norm.weights", "norm.weight_offset"),
        *("layers", "attention.latent.epsilon", "attention.index.epsilon", "rope"),
    }
)
"""Keys that no kernel has to know."""


def list_options(model: Model) -> list[str]:
    """Keys that change the computation if they are not at their defaults, such as
    ``attention.softcap`` and ``moe.router = "sigmoid"``; ``layers.kinds = "+"`` means layers of
    several mixers."""
    kinds = () if model.layers is None else model.layers.kinds
    parts = dict.fromkeys(part for kind in kinds for part in kind.split("+"))
    found = [f'layers.kinds = "{part}"' for part in parts if part != "attention"]
    found += ['layers.kinds = "+"'] if any("+" in kind for kind in kinds) else []
    found += ["layers.parallel"] if model.layers is not None and model.layers.parallel else []
    ropes = [rope for rope in (model.rope, model.other_rope) if rope is not None]
    for key in ("kind", "pairs"):
        words = dict.fromkeys(getattr(rope, key) for rope in ropes)
        default = type(model.rope).model_fields[key].default
        found += [f'rope.{key} = "{word}"' for word in words if word != default]
    if model.other_rope is not None:
        found.append("other_rope")
    return found + list(_list_changes(model, ""))


def _list_changes(table: Any, prefix: str) -> Iterator[str]:
    for name, info in type(table).model_fields.items():
        key, value = prefix + name, getattr(table, name)
        if key in _SILENT or key == "other_rope":
            continue
        if hasattr(type(value), "model_fields"):
            if info.default is None:
                yield key
            yield from _list_changes(value, f"{key}.")
        elif isinstance(value, dict):
            yield from (f"{key}.{own}" for own in value)
        elif isinstance(value, str) and value != info.default:
            yield f'{key} = "{value}"'
        elif not isinstance(value, str) and not info.is_required() and value != info.default:
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
    """Options of a model that are not ``computed``, of an unknown table only the table; or two
    options that exclude each other (``apart``)."""
    options = list_options(model)
    found = [option for option in options if option not in computed]
    found = [key for key in found if key.rpartition(".")[0] not in found]
    pairs = (pair for pair in apart if set(pair) <= set(options))
    return found + [f"{first} with {second}" for first, second in pairs]


def describe_unknown(
    model: Model, computed: Collection[str], context: int, apart: Collection[tuple[str, str]] = ()
) -> list[str]:
    """`find_unknown`, as a backend says it of a plan with a ``context``: an index that is not
    computed is none while every key is attended."""
    index = model.attention.index
    found = [key for key in find_unknown(model, computed, apart) if key != "attention.index"]
    lines = [f"does not know {key}" for key in found]
    if index is not None and "attention.index" not in computed and context > index.reach:
        lines.append(
            f"does not know attention.index, which chooses in contexts of more than {index.reach} "
            f"tokens: write kv.context = {index.reach}, or run the model's GGUF file"
        )
    return lines


Options = Mapping[str, Any]


class Operator(Protocol):
    """What turns the residual stream after the FFN of every layer."""

    name: str

    def find_fault(self, options: Options) -> str | None:
        """The fault in the options of a document; None if there is none."""

    def list_tensors(self, at: Place, options: Options) -> Iterator[DenseTensor]:
        """Its tensors of a layer: sizes, precision, and what checkpoints call them."""

    def compute(self, x: F32, options: Options, read: Callable[[str], F32]) -> F32:
        """x [T, hidden] after the operator; ``read`` gives a tensor of the layer by its kind,
        float32 [rows, length]."""


@cache
def list_operators() -> Mapping[str, Operator]:
    """All operators that modules of this folder add, by name."""
    names = sorted(item.name for item in pkgutil.iter_modules(pi2.model.__path__))
    modules = (importlib.import_module(f"pi2.model.{name}") for name in names)
    return {own.name: own for module in modules for own in getattr(module, "OPERATORS", ())}


def list_own(model: Model) -> list[tuple[Operator, Options]]:
    """Added operators of a model with their options, in the document's order."""
    return [(list_operators()[name], options) for name, options in model.operators.items()]


def check_operators(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Raise `ValueError` for the first operator that is unknown, or whose options are wrong."""
    for name, options in tables.items():
        if name not in list_operators():
            raise ValueError(f"operators.{name} is no operator: no module of pi2.model adds it")
        fault = list_operators()[name].find_fault(options)
        if fault is not None:
            raise ValueError(f"operators.{name}: {fault}")
    return tables
