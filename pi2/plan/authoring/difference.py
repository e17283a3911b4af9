"""What differs between two resolved documents, and what that does to the memory of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
from pi2.plan.arithmetic.sizes import count_unit_needs
from pi2.plan.documents.common import Document
from pi2.plan.toml.paths import KeyPath, format_path
from pi2.plan.toml.source import Kind


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that differs; None where a document does not have it."""

    document: Kind
    path: KeyPath
    before: Any
    after: Any

    @property
    def name(self) -> str:
        """The key path as people write it; that of a device or model begins with its kind."""
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
        """``layer 3`` or ``layers 0-7``."""
        return (
            f"layer {self.first}" if self.first == self.last else f"layers {self.first}-{self.last}"
        )


@dataclass(frozen=True, kw_only=True)
class SegmentChange:
    """A segment of the budget: what it has and what it needs, before and after, in bytes."""

    name: str
    sizes: tuple[int, int]
    needs: tuple[int, int]
    is_main: bool = True
    """Whether it is main memory, on both sides."""


_IGNORED = {"name", "description", "schema_version"}


def compare_documents(kind: Kind, before: Document, after: Document) -> list[Change]:
    """All values that differ, defaults included; names and descriptions do not count."""
    values = [item.model_dump(mode="json", exclude_none=True) for item in (before, after)]
    for item in values:
        for key in _IGNORED:
            item.pop(key, None)
    if kind == "plan":
        for item in values:
            del item["layers"]  # compared as resolved, layer by layer
    return [
        Change(document=kind, path=path, before=old, after=new)
        for path, old, new in _compare(values[0], values[1], ())
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
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return False
    return bool(items) and all("id" in item for item in items)


def compare_plans(before: ResolvedPlan, after: ResolvedPlan) -> list[Change]:
    """All values of plan, device and model that differ; layers are compared by themselves.

    Of a device, a model and a store counts what they are, not how the plan says where they lie.
    """
    same_store = os.path.realpath(before.store_path) == os.path.realpath(after.store_path)
    changes = [
        item
        for item in compare_documents("plan", before.plan, after.plan)
        if item.path not in (("device",), ("model",))
        and not (item.path == ("store",) and same_store)
    ]
    devices = compare_documents("device", before.device, after.device)
    models = compare_documents("model", before.model, after.model)
    return changes + devices + models


def compare_layers(before: ResolvedPlan, after: ResolvedPlan) -> list[LayerChange]:
    """Layers whose resolved settings differ, those that differ alike put together.

    Where the models have different numbers of layers, those that both have.
    """
    pairs = list(enumerate(zip(before.layers, after.layers, strict=False)))
    strides = (before.bundle.stride, after.bundle.stride)
    changes = []
    for _, group in groupby(pairs, key=lambda item: [_describe(layer) for layer in item[1]]):
        items = list(group)
        old, new = items[0][1]
        if _describe(old) == _describe(new):
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


def _describe(layer: ResolvedLayer) -> tuple[object, ...]:
    return dict(layer.split), layer.hot, layer.hot_neurons, layer.dense


def compare_segments(before: ResolvedPlan, after: ResolvedPlan) -> list[SegmentChange]:
    """Every segment, with its size and its need; that of the libraries needs what it has."""
    sizes = [item.plan.memory.segments for item in (before, after)]
    needs = [{name: need.bytes for name, need in item.needs.items()} for item in (before, after)]
    changes = []
    for name in type(sizes[0]).model_fields:
        old, new = getattr(sizes[0], name), getattr(sizes[1], name)
        needed = (needs[0].get(name, old), needs[1].get(name, new))
        changes.append(SegmentChange(name=name, sizes=(old, new), needs=needed))
    return [*changes, *_compare_units(before, after)]


def _compare_units(before: ResolvedPlan, after: ResolvedPlan) -> Iterator[SegmentChange]:
    """What dense units have and need, where that is no part of the segment ``hot``."""
    sides = []
    for item in (before, after):
        needs = {item.name_segment(name): need for name, need in count_unit_needs(item).items()}
        sizes = {f"units.{name}": unit.budget for name, unit in item.plan.memory.units.items()}
        main = {
            f"units.{name}": item.shares_main_memory(name)
            for name in item.plan.memory.units
            if name in item.device.units
        }
        sides.append((needs, sizes, main))
    for name in dict.fromkeys([*sides[0][1], *sides[1][1]]):
        needed = [needs[name].bytes if name in needs else 0 for needs, _, _ in sides]
        sized = [sizes.get(name, 0) for _, sizes, _ in sides]
        yield SegmentChange(
            name=name,
            sizes=(sized[0], sized[1]),
            needs=(needed[0], needed[1]),
            is_main=all(main.get(name, True) for _, _, main in sides),
        )
