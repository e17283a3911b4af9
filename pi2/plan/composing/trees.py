"""Trees of values that remember where they came from, and how they merge.

The rules, for an inherited tree and one of its own:

- tables merge, key by key;
- scalars and arrays replace what is inherited;
- arrays whose items are all tables with an ``id`` merge by it: items of an id that is inherited
  merge as tables and keep their place, others follow;
- ``inherit`` makes an array follow (``append``) or precede (``prepend``) the inherited one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pi2.plan.toml.paths import KeyPath
from pi2.plan.toml.source import SourceFile

Join = Literal["append", "prepend"]
JOINS: tuple[Join, ...] = ("append", "prepend")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file says something about a value."""

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
    """The tree of one file's values."""
    places = (Place(file, path),)
    if isinstance(values, dict):
        children = {key: build_tree(file, item, (*path, key)) for key, item in values.items()}
        return Node(places, table=children)
    if isinstance(values, list):
        items = (build_tree(file, item, (*path, index)) for index, item in enumerate(values))
        return Node(places, items=tuple(items))
    return Node(places, scalar=values)


def extract_values(node: Node) -> Any:
    """The plain values of a tree."""
    if node.table is not None:
        return {key: extract_values(child) for key, child in node.table.items()}
    if node.items is not None:
        return [extract_values(item) for item in node.items]
    return node.scalar


def merge_trees(base: Node, own: Node, joins: object = None) -> Node:
    """``own`` over the inherited ``base``; ``joins`` is what stands in ``inherit``."""
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
    """The deepest node on the way to ``path``, and what is left of the path."""
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


def remove_node(root: Node, names: Sequence[str]) -> Node | int:
    """The tree without the value at ``names``, or the index of the name that is not there.

    Items of an array are named by their ``id``.
    """
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
