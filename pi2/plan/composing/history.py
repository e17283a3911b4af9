"""The history of a value: every place that says something about it, the weakest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pi2.plan.composing.composed import ComposedFile
from pi2.plan.composing.trees import Node, find_node
from pi2.plan.toml.paths import KeyPath
from pi2.plan.toml.source import SourceFile

_REPLACES = "replaces it by"


@dataclass(frozen=True)
class Step:
    """What one file, or ``--set``, says about a value."""

    place: str
    """The place of the step: ``file:line:column``, or ``--set:1:3``."""
    file: str
    verb: str
    """What the step does: ``sets``, ``replaces it by``, ``adds to``, ``appends`` or
    ``prepends``."""
    value: Any
    """The value as it stands at the place."""


def trace_value(source: SourceFile, path: KeyPath) -> tuple[Step, ...]:
    """Steps that led to the value at ``path``; none where it is a default."""
    steps: list[Step] = []
    if isinstance(source, ComposedFile):
        node, rest = find_node(source.tree, path)
        for number, place in enumerate(() if rest else node.places):
            span = place.file.spans.find_value(place.path)
            verb = "sets"
            if place.join is not None:
                verb = f"{place.join}s"
            elif number:
                verb = "adds to" if node.table is not None or _is_mixed(node) else _REPLACES
            value = look_up(place.file.values, place.path)
            steps.append(Step(span.place, span.file, verb, value))
    elif look_up(source.values, path) is not None and not _is_replaced(source, path):
        span = source.spans.find_value(path)
        steps.append(Step(span.place, span.file, "sets", look_up(source.values, path)))
    if _is_replaced(source, path):
        if not isinstance(source, ComposedFile):
            steps += _trace_own_text(source, path)
        span = source.spans.find_value(path)
        verb = _REPLACES if steps else "sets"
        steps.append(Step(span.place, span.file, verb, look_up(source.values, path)))
    return tuple(steps)


def _is_mixed(node: Node) -> bool:
    """Whether an array has entries of several files."""
    return len({item.places[0].file.name for item in node.items or ()}) > 1


def _is_replaced(source: SourceFile, path: KeyPath) -> bool:
    return any(path[:end] in source.replaced for end in range(1, len(path) + 1))


def _trace_own_text(source: SourceFile, path: KeyPath) -> list[Step]:
    """What a plain file says of a value that ``--set`` replaces."""
    from pi2.plan.toml.source import parse_source

    original = parse_source(source.path, source.name, source.text)
    return [] if isinstance(original, list) else list(trace_value(original, path))


def look_up(values: Any, path: Sequence[str | int]) -> Any:
    """The value at ``path`` in plain values; None where there is none (TOML has no null)."""
    for part in path:
        is_key = isinstance(values, dict) and part in values
        is_index = isinstance(values, list) and isinstance(part, int) and 0 <= part < len(values)
        if not (is_key or is_index):
            return None
        values = values[part]
    return values
