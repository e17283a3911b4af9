"""A document put together from several files: its values, and where each of them stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pi2.diagnostics import Span
from pi2.plan.composing.trees import Node, Place, find_node
from pi2.plan.toml.paths import KeyPath, format_path
from pi2.plan.toml.source import Places, SourceFile
from pi2.plan.toml.text import write_value


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
        """Whether the key at ``path``, as findings write it, is what was removed or below it."""
        own = format_path(self.names)
        return path is not None and (path == own or path.startswith(f"{own}."))


class ComposedPlaces:
    """Places of keys and values in the files that they come from."""

    def __init__(self, tree: Node, replaced: Mapping[KeyPath, tuple[Span, Span]]) -> None:
        self.tree = tree
        self.replaced = replaced

    def has(self, path: KeyPath) -> bool:
        """Whether a file, or ``--set``, has the key."""
        return path in self.replaced or not find_node(self.tree, path)[1]

    def has_header(self, path: KeyPath) -> bool:
        """Whether the table begins with a [header] where it stands."""
        place = self._find_place(path)
        return place.file.spans.has_header(place.path)

    def find_key(self, path: KeyPath) -> Span:
        """Span of the key at ``path``, or of its nearest ancestor."""
        other = self._find_replaced(path)
        if other is not None:
            return other[0]
        place = self._find_place(path)
        return place.file.spans.find_key(place.path)

    def find_value(self, path: KeyPath) -> Span:
        """Span of the value at ``path``, or of its nearest ancestor."""
        other = self._find_replaced(path)
        if other is not None:
            return other[1]
        place = self._find_place(path)
        return place.file.spans.find_value(place.path)

    def find_table(self, path: KeyPath) -> Span:
        """Span of the header of the table at ``path``, else of its key, or of an ancestor."""
        other = self._find_replaced(path)
        if other is not None:
            return other[0]
        place = self._find_place(path)
        return place.file.spans.find_table(place.path)

    def list_inherited(self, path: KeyPath) -> list[tuple[Span, str]]:
        """Entries of the table at ``path`` that come from other files than its last one.

        Tables merge, and what was inherited may be what is wrong with the whole.
        """
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
    """A document that extends others.  ``text`` is that of its own file."""

    tree: Node = field(default_factory=lambda: Node(()))
    """The document's values, and where they come from."""

    @cached_property
    def spans(self) -> Places:
        """Places in all of its files."""
        return ComposedPlaces(self.tree, self.replaced)
