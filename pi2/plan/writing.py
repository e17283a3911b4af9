"""A resolved plan as TOML: every default filled in, quantities with units, always the same text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from pydantic import BaseModel

from pi2.plan.fields import find_type
from pi2.plan.paths import KeyPath
from pi2.plan.plan import Plan
from pi2.plan.quantities import approximate_bytes
from pi2.plan.resolved import ResolvedLayer, ResolvedPlan
from pi2.plan.sizes import count_ffn_bytes
from pi2.plan.toml_text import write_key, write_value

Comments = Mapping[KeyPath, str]
"""Remarks behind values, by key path."""


def write_plan(resolved: ResolvedPlan) -> str:
    """Write a plan that resolves to the same digest when it lies beside the original."""
    lines = [f"# digest sha256:{resolved.digest}"]
    lines += (f"# {line}" for line in _describe(resolved))
    comments: Comments = {
        ("memory", "segments", name): f"needs {approximate_bytes(need.bytes)}: {need.explanation}"
        for name, need in resolved.needs.items()
    }
    values = resolved.plan.model_dump(mode="json", exclude_none=True)
    lines += _write_table((), values, comments)
    return "\n".join(lines) + "\n"


def _describe(resolved: ResolvedPlan) -> Iterator[str]:
    """What follows from the plan, for the reader."""
    ffn_bytes = count_ffn_bytes(resolved)
    hot_bytes = resolved.needs.hot.bytes
    cold_bytes = min(resolved.plan.memory.segments.cold, ffn_bytes - hot_bytes)
    yield (
        f"neurons: {approximate_bytes(ffn_bytes)} in the store, "
        f"{approximate_bytes(hot_bytes)} hot, {approximate_bytes(cold_bytes)} of cold cache"
    )
    numbered = list(enumerate(resolved.layers))
    for _, group in groupby(numbered, key=lambda item: (dict(item[1].split), item[1].hot)):
        items = list(group)
        yield _describe_layers(items[0][0], items[-1][0], items[0][1])


def _describe_layers(first: int, last: int, layer: ResolvedLayer) -> str:
    name = f"layer {first}" if first == last else f"layers {first}-{last}"
    shares = ", ".join(f"{unit} {share:.4g}" for unit, share in layer.split.items())
    return f"{name}: {shares}; {layer.hot_neurons} hot neurons"


def _write_table(path: KeyPath, values: Mapping[str, Any], comments: Comments) -> Iterator[str]:
    """Write the plain keys, then the tables below; free-key tables stay on one line."""
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for key, value in values.items():
        if _is_model(find_type(Plan, (*path, key))):
            tables[key] = [value]
        elif isinstance(value, list) and _is_model(find_type(Plan, (*path, key, 0))):
            tables[key] = value
        else:
            line = f"{write_key(key)} = {write_value(value)}"
            comment = comments.get((*path, key))
            yield line if comment is None else f"{line} # {comment}"
    for key, items in tables.items():
        name = ".".join(write_key(str(part)) for part in (*path, key) if isinstance(part, str))
        for number, item in enumerate(items):
            is_array = isinstance(values[key], list)
            inner = (*path, key, number) if is_array else (*path, key)
            body = list(_write_table(inner, item, comments))
            if body:
                yield ""
                yield f"[[{name}]]" if is_array else f"[{name}]"
                yield from body


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
