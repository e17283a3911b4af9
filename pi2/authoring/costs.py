"""What a value of a plan costs: the bytes of the segments that it has a part in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pi2.fitting.sizes import count_unit_needs, find_needs
from pi2.plan.arithmetic.costs import describe_owners, name_memory
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import approximate_bytes, format_bytes
from pi2.plan.toml.text import KeyPath

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


@dataclass(frozen=True)
class Cost:
    """Bytes of one segment, or of a layer's part of it."""

    segment: str
    needed_bytes: int
    text: str


def list_costs(resolved: ResolvedPlan, path: KeyPath) -> Iterator[Cost]:
    """Costs of the value at ``path``; keys of the model begin with ``model``."""
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


def _describe_units(resolved: ResolvedPlan, names: KeyPath) -> Iterator[Cost]:
    """What dense units need of memory that is counted apart, or one of them; what the others need
    is part of the segment ``hot``."""
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
            yield Cost(segment, need.bytes, text)


def _describe_segment(resolved: ResolvedPlan, name: str) -> Cost:
    size = getattr(resolved.plan.memory.segments, name)
    needs = dict(find_needs(resolved).items())
    if name not in needs:
        return Cost(name, size, f"{name}: {format_bytes(size)}")
    need = needs[name]
    text = f"{name}: needs {approximate_bytes(need.bytes)} ({need.explanation}), has "
    return Cost(name, need.bytes, text + format_bytes(size))


def _describe_budget(resolved: ResolvedPlan) -> Cost:
    memory = resolved.plan.memory
    total = sum(getattr(memory.segments, name) for name in type(memory.segments).model_fields)
    text = f"segments: {approximate_bytes(total)} of the budget of {format_bytes(memory.budget)}"
    return Cost("budget", total, text)


def _describe_layer(resolved: ResolvedPlan, number: int) -> Iterator[Cost]:
    if number < len(resolved.layers):
        neurons = resolved.layers[number].hot_neurons
        size = neurons * resolved.bundle.stride
        share = f"layer {number}: {neurons} hot neurons"
        text = f"{share} of {resolved.bundle.stride} bytes, {approximate_bytes(size)}"
        owners = describe_owners(resolved, resolved.layers[number])
        yield Cost("hot", size, "; ".join([text, *owners]))
