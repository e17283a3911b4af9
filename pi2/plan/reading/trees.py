"""Trees of values that remember their origin, and their merging.

The rules, for an inherited tree and one of its own:

- tables merge, key by key;
- scalars and arrays replace the inherited ones;
- arrays whose items are all tables with an ``id`` merge by it: items of an inherited id merge as
  tables and keep their place, others follow;
- ``inherit`` makes an array follow (``append``) or precede (``prepend``) the inherited one."""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args, get_origin

from pi2.diagnostics import Diagnostic, Span
from pi2.plan.documents.common import COMPOSITION, find_type, list_known_keys, suggest
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.source import SET, Places, SourceFile
from pi2.plan.toml.text import KeyPath, format_path, write_value


@dataclass(frozen=True)
class Override:
    """One value, and its place in the text of all overrides."""

    path: KeyPath
    value: object
    key_span: Span
    value_span: Span


@dataclass(frozen=True)
class Overrides:
    """All overridden values of a plan; ``text`` is shown in diagnostics, one line each."""

    items: tuple[Override, ...]
    text: str


def prepare_overrides(values: Mapping[str, object]) -> tuple[Overrides, list[Diagnostic]]:
    """Check that the keys exist in plans, and write the text that diagnostics show."""
    items, findings, lines = [], [], []
    for number, (key, value) in enumerate(values.items(), start=1):
        reason: str | None = None
        plain: object = None
        try:
            plain = None if value is None else _make_plain(value)
            shown = "(left out)" if value is None else write_value(plain)
        except TypeError as error:
            shown, reason = f"<{type(value).__name__}>", str(error)
        lines.append(f"{key} = {shown}")
        key_span = Span(SET, number, 1, number, len(key) + 1)
        value_span = Span(SET, number, len(key) + 4, number, len(key) + 4 + len(shown))
        path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        unknown = _find_unknown(path)
        if unknown is not None:
            findings.append(_report_unknown(path, unknown, key_span))
        elif reason is not None:
            findings.append(Diagnostic(code="P016", message=reason, span=value_span, path=key))
        else:
            items.append(Override(path, plain, key_span, value_span))
    return Overrides(tuple(items), "\n".join(lines)), findings


def _find_unknown(path: KeyPath) -> int | None:
    if path[0] in COMPOSITION:
        return 0  # documents are put together before values are replaced
    for end in range(1, len(path) + 1):
        if find_type(Plan, path[:end]) is None:
            return end - 1
        holder = find_type(Plan, path[: end - 1])
        if get_origin(holder) is dict:
            allowed = get_args(get_args(holder)[0])
            if allowed and isinstance(allowed[0], str) and path[end - 1] not in allowed:
                return end - 1
    return None


def _report_unknown(path: KeyPath, index: int, span: Span) -> Diagnostic:
    parent, name = path[:index], path[index]
    known = [key for key in list_known_keys(Plan, parent) if parent or key not in COMPOSITION]
    near = suggest(str(name), known)
    place = f"in `{format_path(parent)}`" if parent else "in plans"
    help_text = f"known keys: {', '.join(known)}" if known else None
    if near:
        help_text = f"did you mean `{'.'.join(str(part) for part in (*parent, near))}`?"
    return Diagnostic(
        code="P017",
        message=f"unknown key `{name}` {place}",
        help=help_text,
        span=span,
        path=format_path(path),
    )


def apply_overrides(
    values: dict[str, Any], overrides: Overrides
) -> tuple[dict[str, Any], list[Diagnostic]]:
    """``values`` with every override in place, and those without a place; None removes a key."""
    result: dict[str, Any] = copy.deepcopy(values)
    findings = []
    for item in overrides.items:
        current: Any = result
        for number, part in enumerate(item.path):
            if isinstance(part, int) and isinstance(current, list) and part >= len(current):
                findings.append(_report_index(item, number, len(current)))
                break
            fits = isinstance(current, dict if isinstance(part, str) else list)
            if not fits:
                break  # the plan itself is at fault, and that is reported
            if number == len(item.path) - 1:
                if item.value is None:
                    current.pop(part, None)
                else:
                    current[part] = copy.deepcopy(item.value)
            elif isinstance(part, int):
                current = current[part]
            else:
                is_array = isinstance(item.path[number + 1], int)
                current = current.setdefault(part, [] if is_array else {})
    return result, findings


def _report_index(item: Override, number: int, length: int) -> Diagnostic:
    entries = "no entries" if length == 0 else f"the entries 0 to {length - 1}"
    return Diagnostic(
        code="P017",
        message=f"`{format_path(item.path[:number])}` has {entries} in this plan",
        span=item.key_span,
        path=format_path(item.path),
    )


def _make_plain(value: object) -> object:
    """Turn Python values into what TOML has; TypeError if there is no such thing."""
    if isinstance(value, bool | int | float | str | datetime.date | datetime.time):
        return value
    if isinstance(value, Mapping):
        return {str(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"no TOML value: {type(value).__name__}")


Join = Literal["append", "prepend"]
JOINS: tuple[Join, ...] = ("append", "prepend")


@dataclass(frozen=True, slots=True)
class Place:
    file: SourceFile
    path: KeyPath
    """Key path in that file, which may differ from the one in the merged tree."""
    join: Join | None = None
    """How an array was put together with the inherited one; None where it was not."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value: a table, an array, or anything else."""

    places: tuple[Place, ...]
    """Files that say something about it, the weakest first; the last one counts."""
    table: Mapping[str, Node] | None = None
    items: tuple[Node, ...] | None = None
    scalar: Any = None

    @property
    def id(self) -> str | None:
        """The table's ``id``, if it has one that is text."""
        child = None if self.table is None else self.table.get("id")
        return child.scalar if child is not None and isinstance(child.scalar, str) else None


def build_tree(file: SourceFile, values: Any, path: KeyPath = ()) -> Node:
    places = (Place(file, path),)
    if isinstance(values, dict):
        children = {key: build_tree(file, item, (*path, key)) for key, item in values.items()}
        return Node(places, table=children)
    if isinstance(values, list):
        items = (build_tree(file, item, (*path, index)) for index, item in enumerate(values))
        return Node(places, items=tuple(items))
    return Node(places, scalar=values)


def extract_values(node: Node) -> Any:
    if node.table is not None:
        return {key: extract_values(child) for key, child in node.table.items()}
    if node.items is not None:
        return [extract_values(item) for item in node.items]
    return node.scalar


def merge_trees(base: Node, own: Node, joins: object = None) -> Node:
    """``own`` over the inherited ``base``; ``joins`` is the value of ``inherit``."""
    places = base.places + own.places
    if base.table is not None and own.table is not None:
        below = joins if isinstance(joins, Mapping) else {}
        children = dict(base.table)
        for key, child in own.table.items():
            old = children.get(key)
            children[key] = child if old is None else merge_trees(old, child, below.get(key))
        return Node(places, table=children)
    if base.items is None or own.items is None:
        return replace(own, places=places)
    join: Join | None = next((item for item in JOINS if item == joins), None)
    if join is not None:
        places = (*base.places, replace(own.places[-1], join=join))
    if has_ids(base.items) and has_ids(own.items):
        return Node(places, items=_merge_items(base.items, own.items, join))
    if join == "append":
        return Node(places, items=base.items + own.items)
    if join == "prepend":
        return Node(places, items=own.items + base.items)
    return replace(own, places=places)


def has_ids(items: Sequence[Node]) -> bool:
    """Whether every item is a table with an ``id``, and no two have the same."""
    ids = [item.id for item in items]
    return bool(ids) and None not in ids and len(set(ids)) == len(ids)


def _merge_items(
    base: tuple[Node, ...], own: tuple[Node, ...], join: Join | None
) -> tuple[Node, ...]:
    mine = {item.id: item for item in own}
    merged = tuple(merge_trees(item, mine[item.id]) if item.id in mine else item for item in base)
    inherited = {item.id for item in base}
    new = tuple(item for item in own if item.id not in inherited)
    return new + merged if join == "prepend" else merged + new


def find_node(root: Node, path: KeyPath) -> tuple[Node, KeyPath]:
    """The deepest node on the way to ``path``, and the rest of the path."""
    node = root
    for number, part in enumerate(path):
        child: Node | None = None
        if node.table is not None and isinstance(part, str):
            child = node.table.get(part)
        elif node.items is not None and isinstance(part, int) and 0 <= part < len(node.items):
            child = node.items[part]
        if child is None:
            return node, path[number:]
        node = child
    return node, ()


def replace_node(root: Node, path: Sequence[str], node: Node) -> Node:
    """The tree with another ``node`` at ``path``, if it has one."""
    if not path:
        return node
    assert root.table is not None
    below = replace_node(root.table[path[0]], path[1:], node)
    return replace(root, table={**root.table, path[0]: below})


def remove_node(root: Node, names: Sequence[str]) -> Node | int:
    """The tree without the value at ``names``, or the index of the missing name; items by
    ``id``."""
    name, rest = names[0], names[1:]
    if root.table is not None and name in root.table:
        children = dict(root.table)
        if rest:
            child = remove_node(children[name], rest)
            if isinstance(child, int):
                return child + 1
            children[name] = child
        else:
            del children[name]
        return replace(root, table=children)
    if root.items is not None:
        for index, item in enumerate(root.items):
            if item.id != name:
                continue
            kept: tuple[Node, ...] = ()
            if rest:
                child = remove_node(item, rest)
                if isinstance(child, int):
                    return child + 1
                kept = (child,)
            return replace(root, items=root.items[:index] + kept + root.items[index + 1 :])
    return 0


def list_names(node: Node) -> list[str]:
    """Names that a value below ``node`` may be removed by."""
    if node.table is not None:
        return list(node.table)
    return [item.id for item in node.items or () if item.id is not None]


@dataclass(frozen=True)
class Link:
    """One entry of ``extends``."""

    file: SourceFile
    path: KeyPath
    reference: str

    @property
    def note(self) -> str:
        """The entry and its place, for the origins of a finding."""
        place = self.file.spans.find_value(self.path).place
        return f"{place}: extends {write_value(self.reference)}"


Chain = tuple[Link, ...]
"""The way from a document to one of its files."""


@dataclass(frozen=True)
class Removal:
    """One entry of ``remove`` that took something away."""

    file: SourceFile
    index: int
    names: tuple[str, ...]

    @property
    def note(self) -> str:
        """The entry and its place, for the origins of a finding."""
        place = self.file.spans.find_value(("remove", self.index)).place
        return f"{place}: removed here"

    def covers(self, path: str | None) -> bool:
        """Whether the key at ``path``, as findings write it, was removed with a key above it."""
        own = format_path(self.names)
        return path is not None and (path == own or path.startswith(f"{own}."))


class ComposedPlaces:
    """Places of keys and their values in the original files."""

    def __init__(self, tree: Node, replaced: Mapping[KeyPath, tuple[Span, Span]]) -> None:
        self.tree = tree
        self.replaced = replaced

    def has(self, path: KeyPath) -> bool:
        """Whether a file, or ``--set``, has the key."""
        return path in self.replaced or not find_node(self.tree, path)[1]

    def has_header(self, path: KeyPath) -> bool:
        place = self._find_place(path)
        return place.file.spans.has_header(place.path)

    def find_key(self, path: KeyPath) -> Span:
        return self._find(path, 0, "find_key")

    def find_value(self, path: KeyPath) -> Span:
        return self._find(path, 1, "find_value")

    def find_table(self, path: KeyPath) -> Span:
        return self._find(path, 0, "find_table")

    def _find(self, path: KeyPath, part: int, way: str) -> Span:
        other, place = self._find_replaced(path), self._find_place(path)
        found: Span = getattr(place.file.spans, way)(place.path) if other is None else other[part]
        return found

    def list_inherited(self, path: KeyPath) -> list[tuple[Span, str]]:
        """Entries of the table at ``path`` from other files than its last one."""
        node, rest = find_node(self.tree, path)
        if rest or node.table is None or self._find_replaced(path) is not None:
            return []
        last = node.places[-1].file
        places = [(key, child, child.places[-1]) for key, child in node.table.items()]
        return [
            (place.file.spans.find_value(place.path), f"{key} = {write_value(child.scalar)}")
            for key, child, place in places
            if place.file is not last and child.table is None and child.items is None
        ]

    def _find_replaced(self, path: KeyPath) -> tuple[Span, Span] | None:
        ends = range(len(path), 0, -1)
        return next((self.replaced[path[:e]] for e in ends if path[:e] in self.replaced), None)

    def _find_place(self, path: KeyPath) -> Place:
        """The last file that speaks of ``path`` or of its nearest ancestor."""
        node, rest = find_node(self.tree, path)
        place = node.places[-1]
        return Place(place.file, (*place.path, *rest))


@dataclass(frozen=True)
class ComposedFile(SourceFile):
    """A document that extends others. ``text`` is its own file's."""

    tree: Node = field(default_factory=lambda: Node(()))
    """The document's values, and where they come from."""

    @cached_property
    def spans(self) -> Places:
        return ComposedPlaces(self.tree, self.replaced)
