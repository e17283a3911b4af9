"""Resolved documents as TOML, always the same text; the bytes that values of a plan cost."""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

from pi2.fitting import count_unit_needs
from pi2.plan.arithmetic.resolved import ResolvedPlan, name_layers
from pi2.plan.arithmetic.sizes import describe_owners, name_memory
from pi2.plan.documents.common import Document, Sampling, choose_chat_sampling, find_type, is_table
from pi2.plan.documents.model import Model, WrittenModel
from pi2.plan.documents.quantities import (
    approximate_bytes,
    explain_giga_ops,
    explain_rate,
    format_bytes,
)
from pi2.plan.reading.block_entries import gather_blocks, list_entries
from pi2.plan.toml.source import SourceFile
from pi2.plan.toml.text import KeyPath, look_up, write_key, write_value

Comment = Callable[[KeyPath], str | None]


def write_plan(resolved: ResolvedPlan, source: SourceFile | None = None) -> str:
    """Write a plan with the same digest; with ``source`` each value is followed by its origin."""
    lines = [f"# digest sha256:{resolved.digest}"]
    lines += (f"# {line}" for line in _describe(resolved))
    lines += (f"# {line}" for line in _describe_chats(resolved))
    needs: dict[KeyPath, str] = {
        ("memory", "segments", name): f"needs {approximate_bytes(need.bytes)}: {need.explanation}"
        for name, need in resolved.needs.items()
    }

    def comment(path: KeyPath) -> str | None:
        why = resolved.derived.get(path)
        parts = [needs.get(path), None if why is None else f"derived: {why}"]
        parts += [None if source is None else find_origin(source, path)]
        return "; ".join(part for part in reversed(parts) if part is not None) or None

    return "\n".join([*lines, write_body(resolved.plan, comment)])


def write_document(
    document: Document, source: SourceFile | None = None, *, origins: bool = False
) -> str:
    """Write a device or model, or a plan without remarks; of a ``source``, with how data sheets'
    figures were converted, and ``origins``."""

    def comment(path: KeyPath) -> str | None:
        if source is None:
            return None
        parts = _find_formula(source, path), find_origin(source, path) if origins else None
        return "; ".join(part for part in parts if part is not None) or None

    return write_body(document, comment)


def _find_formula(source: SourceFile, path: KeyPath) -> str | None:
    """How a data sheet's figure was converted."""
    stated = look_up(source.values, path)
    if not isinstance(stated, str):
        return None
    found = explain_rate(stated) or explain_giga_ops(stated)
    if stated.rstrip().endswith("IOPS"):
        return f"{stated} x block"
    return found[1] if found else None


def find_origin(source: SourceFile, path: KeyPath) -> str:
    spans = source.spans
    return spans.find_value(path).place if spans.has(path) else "default"


def write_body(document: Document, comment: Comment) -> str:
    """Write all values of a document with the remarks that ``comment`` gives."""
    values = document.model_dump(mode="json", exclude_none=True)
    for key, value in document:
        # A default that was written out would be one that the plan states.
        if isinstance(value, Sampling):
            values[key] = value.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    root = type(document)
    if isinstance(document, Model):
        root, values = WrittenModel, gather_blocks(document, values)
    return "\n".join(write_tables(root, (), values, comment)) + "\n"


def _describe_chats(resolved: ResolvedPlan) -> Iterator[str]:
    """How chats and servers draw, by the origin of values."""
    chosen = choose_chat_sampling(resolved.plan.sampling, resolved.model.sampling)
    by_origin: dict[str, list[str]] = {}
    for name, (value, origin) in chosen.items():
        by_origin.setdefault(origin, []).append(f"{name} = {write_value(value)}")
    by_origin.pop("default", None)
    for origin, values in by_origin.items():
        yield f"chats and servers: {', '.join(values)} ({origin})"


def _describe(resolved: ResolvedPlan) -> Iterator[str]:
    for entry in list_entries(resolved.model):
        layers = f"layers {entry['layers']}" if "layers" in entry else "blocks"
        parts = (f"{key} = {write_value(entry[key])}" for key in ("mix", "ffn") if key in entry)
        yield f"{layers}: {', '.join(parts)}"
    yield from resolved.source.describe(resolved)
    numbered = list(enumerate(resolved.source.list_set(resolved.layers)))
    for _, group in groupby(numbered, key=lambda item: item[1].settings):
        items = list(group)
        layer = items[0][1]
        shares = ", ".join(f"{unit} {share:.4g}" for unit, share in layer.split.items())
        name = name_layers(items[0][0], items[-1][0])
        yield f"{name}: {shares}; {layer.hot_neurons} hot neurons"
        yield from (f"  {line}" for line in describe_owners(resolved, layer))
    rows = resolved.divided_rows
    if rows is not None:
        yield (
            f"projections: {rows.unit} computes {rows.qkv} rows to query, key and value and "
            f"{rows.output} of the output in each layer, {rows.head} of the head; "
            f"{resolved.sparse_unit} the others"
        )
    for name, need in count_unit_needs(resolved).items():
        yield (
            f"{name}: needs {approximate_bytes(need.bytes)} of {name_memory(resolved, name)}: "
            f"{need.explanation}"
        )


def write_tables(
    root: type[Document],
    path: KeyPath,
    values: Mapping[str, Any],
    comment: Comment = lambda path: None,
) -> Iterator[str]:
    """Lines of a document: plain keys, then tables; ``comment`` gives the remark behind a value."""
    tables: dict[str, list[Mapping[str, Any]]] = {}
    for key, value in values.items():
        if path[:1] == ("blocks",):
            yield f"{write_key(key)} = {write_value(value)}"
        elif is_table(find_type(root, (*path, key))) or _holds_models(root, (*path, key), value):
            tables[key] = [value]
        elif isinstance(value, list) and value and is_table(find_type(root, (*path, key, 0))):
            tables[key] = value
        else:
            line = f"{write_key(key)} = {write_value(value)}"
            remark = comment((*path, key))
            yield line if remark is None else f"{line} # {remark}"
    for key, items in tables.items():
        name = ".".join(write_key(part) for part in (*path, key) if isinstance(part, str))
        for number, item in enumerate(items):
            is_array = isinstance(values[key], list)
            inner = (*path, key, number) if is_array else (*path, key)
            body = list(write_tables(root, inner, item, comment))
            if body and (is_array or body[0]):
                yield ""
                yield f"[[{name}]]" if is_array else f"[{name}]"
            yield from body


def _holds_models(root: type[Document], path: KeyPath, value: object) -> bool:
    """Whether a table with names of the user's has tables in it, such as a device's units."""
    return isinstance(value, dict) and any(is_table(find_type(root, (*path, key))) for key in value)


_SEGMENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("kv",): ("kv", "workspace"),
    ("model", "layers"): ("attention", "kv", "state", "workspace"),
    ("model", "recurrence"): ("attention", "state", "workspace"),
    ("model", "convolution"): ("attention", "state", "workspace"),
    ("layers", "hot"): ("hot", "cold"),
    ("layers", "split"): ("hot", "cold"),
    ("layers", "batches"): ("hot", "cold"),
    ("layers", "overrides"): ("hot", "cold"),
    ("decode", "predictor"): ("predictor", "cold"),
    ("prefill", "chunk"): ("workspace",),
    ("prefill", "unit"): ("hot",),
    ("projections",): ("hot",),
    ("units",): ("hot", "cold"),
    ("bundle", "stride"): ("hot", "cold", "workspace"),
    ("bundle", "scales"): ("attention", "workspace"),
    ("threads",): ("workspace",),
    ("model", "shape"): ("attention", "kv", "predictor", "hot", "cold", "workspace"),
    ("model", "quantization", "ffn"): ("hot", "cold", "predictor", "workspace"),
    ("model", "quantization", "gate_up"): ("hot", "cold", "predictor", "workspace"),
    ("model", "quantization", "attention"): ("attention",),
    ("model", "quantization", "embedding"): ("attention",),
    ("model", "quantization", "head"): ("attention",),
    ("model", "quantization", "predictor"): ("predictor",),
    ("model", "tied_head"): ("attention",),
    ("model", "predictor"): ("predictor", "cold"),
    ("model", "sparsity"): ("cold",),
    ("model", "moe"): ("attention", "predictor", "hot", "cold", "workspace"),
}
"""Segments whose size follows from a key; keys of the model begin with ``model``."""


def list_costs(resolved: ResolvedPlan, path: KeyPath) -> Iterator[str]:
    """Bytes that the value at ``path`` costs; keys of the model begin with ``model``."""
    if path[:2] == ("memory", "segments") and len(path) == 3:
        yield _describe_segment(resolved, str(path[2]))
    elif path[:2] == ("memory", "units"):
        yield from _describe_units(resolved, path[2:3])
    elif path[:1] == ("memory",):
        yield _describe_budget(resolved)
    elif path[:1] == ("layers",) and len(path) > 1 and isinstance(path[1], int):
        yield from _describe_layer(resolved, path[1])
    else:
        names: dict[str, None] = {}
        for prefix, segments in _SEGMENTS.items():
            if path[: len(prefix)] == prefix or prefix[: len(path)] == path:
                names |= dict.fromkeys(segments)
        for name in names:
            yield _describe_segment(resolved, name)
        if path[:1] == ("units",):
            yield from _describe_units(resolved, path[1:2])
        elif path[0] in ("layers", "projections") or path == ("prefill", "unit"):
            yield from _describe_units(resolved, ())


def _describe_units(resolved: ResolvedPlan, names: KeyPath) -> Iterator[str]:
    """Memory needed by dense units; units in main memory are part of the segment ``hot``."""
    for name, need in count_unit_needs(resolved).items():
        segment = resolved.name_segment(name)
        if segment == "hot" and names[:1] != (name,):
            continue
        if not names or names == (name,):
            memory = resolved.plan.memory.units.get(name)
            text = f"{name}: needs {approximate_bytes(need.bytes)} ({need.explanation}) of "
            text += name_memory(resolved, name)
            if memory is not None:
                text += f", which has {format_bytes(memory.budget)}"
            yield text


def _describe_segment(resolved: ResolvedPlan, name: str) -> str:
    size = getattr(resolved.plan.memory.segments, name)
    needs = dict(resolved.needs.items())
    if name not in needs:
        return f"{name}: {format_bytes(size)}"
    need = needs[name]
    text = f"{name}: needs {approximate_bytes(need.bytes)} ({need.explanation}), has "
    return text + format_bytes(size)


def _describe_budget(resolved: ResolvedPlan) -> str:
    memory = resolved.plan.memory
    total = sum(getattr(memory.segments, name) for name in type(memory.segments).model_fields)
    return f"segments: {approximate_bytes(total)} of the budget of {format_bytes(memory.budget)}"


def _describe_layer(resolved: ResolvedPlan, number: int) -> Iterator[str]:
    if number < len(resolved.layers):
        neurons = resolved.layers[number].hot_neurons
        size = neurons * resolved.bundle.stride
        share = f"layer {number}: {neurons} hot neurons"
        text = f"{share} of {resolved.bundle.stride} bytes, {approximate_bytes(size)}"
        owners = describe_owners(resolved, resolved.layers[number])
        yield "; ".join([text, *owners])
