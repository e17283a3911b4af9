"""What differs between two resolved documents, and what that does to the memory of a plan."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tomli

from pi2.diagnostics import Diagnostic
from pi2.fitting import count_unit_needs
from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan, name_layers
from pi2.plan.documents.common import Document
from pi2.plan.reading.deprecations import RENAMES, STEPS, Rename, Step, find_old_keys
from pi2.plan.reading.references import DOCUMENTS
from pi2.plan.toml.source import Kind, SourceFile, parse_source
from pi2.plan.toml.text import KeyPath, format_path, write_key


@dataclass(frozen=True)
class Migration:
    text: str
    changes: tuple[str, ...]
    """The changes that were made, one line each; empty where the text is current."""
    findings: tuple[Diagnostic, ...] = ()
    """The reasons why the text cannot be migrated; it is as it was then."""


def migrate_text(
    kind: Kind,
    name: str,
    text: str,
    *,
    steps: Mapping[int, Step] = STEPS,
    renames: Sequence[Rename] = RENAMES,
    newest: int | None = None,
) -> Migration:
    """Bring a document's ``text`` to version ``newest``, or to that in which its kind changed last;
    ``name`` is for findings."""
    changes: list[str] = []
    newest = newest or DOCUMENTS[kind].VERSION
    source = parse_source(Path(name), name, text)
    if isinstance(source, list):
        return Migration(text, (), tuple(source))
    version = source.values.get("schema_version")
    if version is None:
        # Whoever leaves it out writes the language as it is.
        text = _add_version(text, newest)
        changes.append("added schema_version")
    elif type(version) is int and version < newest and version in steps:
        text = _take_steps(kind, text, version, steps, newest)
        changes.append(f"schema_version {version} is {newest} now")
    if changes:
        source = parse_source(Path(name), name, text)
        assert not isinstance(source, list), source
    own = [item for item in renames if item.kind == kind]
    text, renamed = _rename_keys(source, [item for item in own if item.new])
    text, removed = _remove_keys(text, [item for item in own if not item.new])
    return Migration(text, (*changes, *renamed, *removed))


def _add_version(text: str, version: int) -> str:
    line = f"schema_version = {version}\n"
    if text.startswith("#:schema"):
        first, end, rest = text.partition("\n")
        return f"{first}{end or chr(10)}{line}{rest}"
    return line + text


def _take_steps(kind: Kind, text: str, version: int, steps: Mapping[int, Step], newest: int) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for number in range(version, newest):
        steps[number](document, kind)
        document["schema_version"] = number + 1
    return tomlkit.dumps(document)


def _rename_keys(source: SourceFile, renames: Sequence[Rename]) -> tuple[str, list[str]]:
    """Replace old names, the last one first, which leaves earlier places valid."""
    lines = source.text.split("\n")
    index = source.index()
    found = [
        (index.keys[path], rename)
        for rename in renames
        for path in find_old_keys(source.values, rename)
        if path in index.keys
    ]
    changes = []
    for span, rename in sorted(found, key=lambda item: (-item[0].line, -item[0].column)):
        line = lines[span.line - 1]
        new = write_key(rename.new or "")
        lines[span.line - 1] = line[: span.column - 1] + new + line[span.end_column - 1 :]
        changes.append(f"line {span.line}: {rename.old} is {rename.new} now")
    return "\n".join(lines), changes[::-1]


def _remove_keys(text: str, renames: Sequence[Rename]) -> tuple[str, list[str]]:
    found = [
        path
        for rename in renames
        if rename.old in text
        for path in find_old_keys(tomli.loads(text), rename)
    ]
    if not found:
        return text, []
    import tomlkit

    document = tomlkit.parse(text)
    for path in found:
        table: Any = document
        for part in path[:-1]:
            table = table[part]
        del table[path[-1]]
    return tomlkit.dumps(document), [f"removed {format_path(path)}" for path in found]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that differs; None where a document does not have it."""

    document: Kind
    path: KeyPath
    before: Any
    after: Any

    @property
    def name(self) -> str:
        """The key path as people write it; a device's or model's begins with its kind."""
        path = self.path if self.document == "plan" else (self.document, *self.path)
        return format_path(path)


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """Layers whose settings differ in the same way."""

    first: int
    last: int
    before: ResolvedLayer
    after: ResolvedLayer
    hot_bytes: tuple[int, int]
    """Bytes of the hot neurons of one layer, before and after."""

    @property
    def name(self) -> str:
        return name_layers(self.first, self.last)


@dataclass(frozen=True, kw_only=True)
class SegmentChange:
    """A segment of the budget: its size and its need, before and after, in bytes."""

    name: str
    sizes: tuple[int, int]
    needs: tuple[int, int]
    is_main: bool = True
    """Whether it is main memory, on both sides."""


def compare_documents(kind: Kind, before: Document, after: Document) -> list[Change]:
    """All values that differ, defaults included; names and descriptions do not count."""
    ignored = {"name", "description", "schema_version"}
    ignored |= {"layers"} if kind == "plan" else set()  # compared as resolved, layer by layer
    old, new = (
        item.model_dump(mode="json", exclude_none=True, exclude=ignored) for item in (before, after)
    )
    return [
        Change(document=kind, path=path, before=first, after=second)
        for path, first, second in _compare(old, new, ())
    ]


def _compare(before: Any, after: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _compare(before.get(key), after.get(key), (*path, key))
    elif _is_keyed(before) and _is_keyed(after):
        tables = [{item["id"]: item for item in items} for items in (before, after)]
        yield from _compare(tables[0], tables[1], path)
    elif before != after:
        yield path, before, after


def _is_keyed(items: Any) -> bool:
    """Whether an array's entries have an ``id`` each, by which they are compared."""
    is_array = isinstance(items, list) and bool(items)
    return is_array and all(isinstance(item, dict) and "id" in item for item in items)


def compare_plans(before: ResolvedPlan, after: ResolvedPlan) -> list[Change]:
    """Values of plan, device and model that differ, without layers and paths of documents."""
    same_store = os.path.realpath(before.store_path) == os.path.realpath(after.store_path)
    changes = [
        item
        for item in compare_documents("plan", before.plan, after.plan)
        if item.path not in (("device",), ("model",))
        and not (item.path == ("weights",) and same_store)
    ]
    devices = compare_documents("device", before.device, after.device)
    models = compare_documents("model", before.model, after.model)
    return changes + devices + models


def compare_layers(before: ResolvedPlan, after: ResolvedPlan) -> list[LayerChange]:
    """Layers whose resolved settings differ, grouped by equal difference."""
    layers = [item.source.list_set(item.layers) for item in (before, after)]
    pairs = list(enumerate(zip(*layers, strict=False)))
    strides = (before.bundle.stride, after.bundle.stride)
    changes = []
    for _, group in groupby(pairs, key=lambda item: [layer.settings for layer in item[1]]):
        items = list(group)
        old, new = items[0][1]
        if old.settings == new.settings:
            continue
        changes.append(
            LayerChange(
                first=items[0][0],
                last=items[-1][0],
                before=old,
                after=new,
                hot_bytes=(old.hot_neurons * strides[0], new.hot_neurons * strides[1]),
            )
        )
    return changes


def compare_segments(before: ResolvedPlan, after: ResolvedPlan) -> list[SegmentChange]:
    """Every segment, and the memory of every dense unit that has its own, with size and need; the
    libraries' need equals their size."""
    sizes, needs, elsewhere = zip(*map(_measure_segments, (before, after)), strict=True)
    return [
        SegmentChange(
            name=name,
            sizes=(sizes[0].get(name, 0), sizes[1].get(name, 0)),
            needs=(needs[0].get(name, 0), needs[1].get(name, 0)),
            is_main=name not in elsewhere[0] | elsewhere[1],
        )
        for name in dict.fromkeys([*sizes[0], *sizes[1]])
    ]


def _measure_segments(resolved: ResolvedPlan) -> tuple[dict[str, int], dict[str, int], set[str]]:
    """Sizes and needs by name, and the names outside of main memory."""
    memory = resolved.plan.memory
    segments: dict[str, int] = dict(memory.segments)
    units = {resolved.name_segment(name): need for name, need in count_unit_needs(resolved).items()}
    needs = {name: need.bytes for name, need in (*units.items(), *resolved.needs.items())}
    known = [name for name in memory.units if name in resolved.device.units]
    return (
        segments | {f"units.{name}": int(unit.budget) for name, unit in memory.units.items()},
        segments | needs,
        {f"units.{name}" for name in known if not resolved.shares_main_memory(name)},
    )
