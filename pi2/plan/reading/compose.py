"""Composition: a document that ``extends`` others, with its removals and joins.

::

    extends = ["../common/phone.plan.toml", "fast-flash.toml"]   # earlier is weaker
    remove = ["memory.segments.cold"]                            # of inherited keys
    inherit.layers.overrides = "append"                          # instead of replacing

Only documents with one of these keys come here. Inherited paths of devices, models and stores are
rewritten relative to the extending file: the outcome is a plain document."""

import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.documents.common import COMPOSITION, suggest
from pi2.plan.reading.block_entries import spread_blocks
from pi2.plan.reading.deprecations import modernise
from pi2.plan.reading.references import (
    DOCUMENTS,
    MAX_LENGTH,
    Located,
    Resolver,
    UnknownName,
    check_suffix,
    guess_kind,
    has_scheme,
    is_path,
    locate_document,
    read_document,
    report_kind,
)
from pi2.plan.reading.schema_check import check_version
from pi2.plan.reading.trees import (
    JOINS,
    Chain,
    ComposedFile,
    Link,
    Node,
    Removal,
    build_tree,
    extract_values,
    find_node,
    list_names,
    merge_trees,
    remove_node,
    replace_node,
)
from pi2.plan.toml.source import CANNOT_READ, Kind, SourceFile
from pi2.plan.toml.text import KeyPath, format_path, look_up, write_value

MAX_DEPTH = 8
"""Longest chain of documents that extend one another."""
MAX_FILES = 64
"""Most files that one document is put together from; a file that comes twice counts twice."""
MAX_ENTRIES = 256
"""Most entries of ``extends`` and ``remove``."""

_WANTED = {
    "extends": 'an array of texts, such as `["base.plan.toml"]`',
    "remove": 'an array of texts, such as `["units.npu"]`',
    "inherit": 'a table, such as `inherit.layers.overrides = "append"`',
}

_REFERENCES: tuple[tuple[str, ...], ...] = (
    *(("device",), ("model",), ("weights",), ("sparsity", "thresholds")),
    ("decode", "speculation", "plan"),
)
"""Keys of plans whose texts are paths, or may be."""
_PLAIN_PATHS = ("weights", "thresholds")
"""Keys that state paths of files which are no documents: they are always paths."""


class Composition:
    """A document put together with all that it extends."""

    def __init__(
        self,
        source: SourceFile,
        kind: Kind,
        *,
        resolver: Resolver | None = None,
        origin: str | None = None,
        root: Path | None = None,
    ) -> None:
        """``root``: folder of the document that the user named, if it is another one."""
        self.root = root or source.path.parent
        self.kind: Kind = kind
        self.resolver = resolver
        self.count = 0
        self.read: dict[Path, SourceFile | list[Diagnostic]] = {}
        self.diagnostics: list[Diagnostic] = []
        """Errors in the document and in the documents that it extends."""
        self.warnings: list[Diagnostic] = []
        self.files: dict[str, SourceFile] = {}
        """Files that were read, by name."""
        self.removed: list[Removal] = []
        self.chains: dict[str, Chain] = {}
        """The first way to each of them."""
        tree = self.assemble(source, (), (os.path.realpath(source.path),), origin)
        values = extract_values(tree)
        self.file = ComposedFile(source.path, source.name, source.text, values, tree=tree)

    @property
    def is_whole(self) -> bool:
        """Whether everything that it asks for was found."""
        return not self.diagnostics

    def assemble(
        self, source: SourceFile, chain: Chain, stack: tuple[str, ...], origin: str | None
    ) -> Node:
        own = build_tree(
            source, {key: v for key, v in source.values.items() if key not in COMPOSITION}
        )
        base: Node | None = None
        for index, reference in self.list_texts(source, "extends"):
            link = Link(source, ("extends", index), reference)
            node = self.load_base(link, chain, stack, origin)
            if node is not None:
                base = node if base is None else merge_trees(base, node)
        joins = self.check_type(source, "inherit", dict) or {}
        removed = list(self.list_texts(source, "remove"))
        if base is None:
            if "extends" not in source.values:
                self.report_alone(source)
            return own
        for index, text in removed:
            base = self.remove(base, source, index, text)
        self.check_joins(source, joins, base, own)
        return merge_trees(base, own, joins)

    def check_type(self, source: SourceFile, key: str, wanted: type) -> Any:
        """The value of a key of composition; None where there is none of the right type."""
        value = source.values.get(key)
        if value is None or isinstance(value, wanted):
            return value
        self.report(source, (key,), "P103", f"`{key}` is {_WANTED[key]}")
        return None

    def list_texts(self, source: SourceFile, key: str) -> Iterator[tuple[int, str]]:
        """Yield the sound entries of ``extends`` or ``remove``."""
        entries = self.check_type(source, key, list) or []
        if len(entries) > MAX_ENTRIES:
            message = f"`{key}` has {len(entries)} entries, at most {MAX_ENTRIES} are read"
            self.report(source, (key,), "P022", message)
            return
        for index, text in enumerate(entries):
            if not isinstance(text, str) or not 0 < len(text) <= MAX_LENGTH:
                message = f"`{key}` is {_WANTED[key]}, of 1 to {MAX_LENGTH} characters each"
                self.report(source, (key, index), "P103", message)
            else:
                yield index, text

    def report(
        self, source: SourceFile, path: KeyPath, code: str, message: str, help: str | None = None
    ) -> None:
        self.diagnostics.append(source.report(code, path, message, help))

    def report_all(self, error: UserError, span: Span, path: KeyPath) -> None:
        """Report what ``error`` tells at another place."""
        found = (replace(item, span=span, path=format_path(path)) for item in error.diagnostics)
        self.diagnostics += found

    def report_alone(self, source: SourceFile) -> None:
        for key in ("inherit", "remove"):
            if key in source.values:
                message = f"`{key}` without `extends`: there is nothing inherited"
                self.report(source, (key,), "P025", message, "add `extends = [...]`, or remove it")

    def load_base(
        self, link: Link, chain: Chain, stack: tuple[str, ...], origin: str | None
    ) -> Node | None:
        """The tree of what an entry of ``extends`` means."""
        located = self.locate(link, origin)
        if located is None:
            return None
        real = os.path.realpath(located.path) if "\0" not in str(located.path) else ""
        if real in stack:
            message = f"{write_value(link.reference)} extends itself"
            if real != stack[-1]:
                message = f"{write_value(link.reference)} leads back to a document that extends it"
            self.report(link.file, link.path, "P021", message, "remove one of the references")
            return None
        self.count += 1
        if len(stack) > MAX_DEPTH or self.count > MAX_FILES:
            message = f"a chain of more than {MAX_DEPTH} documents that extend one another"
            if len(stack) <= MAX_DEPTH:
                message = f"more than {MAX_FILES} files are extended"
            if not any(item.code == "P022" for item in self.diagnostics):
                self.report(link.file, link.path, "P022", message, "put some of them together")
            return None
        way = (*chain, link)
        self.chains.setdefault(located.name, way)
        source = self.read_base(link, located)
        if source is None:
            return None
        self.files.setdefault(source.name, source)
        tree = self.assemble(source, way, (*stack, real), located.reference)
        return self.rebase(tree, link.reference, located)

    def locate(self, link: Link, origin: str | None) -> Located | None:
        reference = link.reference
        try:
            located = locate_document(
                reference,
                self.kind,
                link.file.path.parent,
                resolver=self.resolver,
                origin=origin,
                root=self.root,
            )
        except UnknownName as error:
            self.report(link.file, link.path, "P020", str(error), error.hint)
            return None
        except UserError as error:
            self.report_all(error, link.file.spans.find_value(link.path), link.path)
            return None
        wrong = check_suffix(located.file_name, located.name, self.kind)
        if wrong is not None and wrong.code == "P014":
            self.report(link.file, link.path, "P014", wrong.message, wrong.help)
            return None
        return located

    def read_base(self, link: Link, located: Located) -> SourceFile | None:
        """Read a file, once; its errors are reported at their places."""
        first = located.path not in self.read
        if first:
            root = self.root if located.reference is None else None
            read = read_document(located.path, located.name, f".{self.kind}.toml", root)
            if not isinstance(read, list):
                read, warnings = modernise(read, self.kind)
                self.warnings += warnings
                if self.kind == "model":
                    read, faults = spread_blocks(read)
                    self.diagnostics += faults
            self.read[located.path] = read
        source = self.read[located.path]
        if isinstance(source, list):
            for item in source:
                if item.code in CANNOT_READ:
                    message = f"{located.name}: {item.message}"
                    self.report(link.file, link.path, "P020", message, item.help)
                elif first:
                    self.diagnostics.append(item)
            return None
        if not first:
            return source
        other = guess_kind(source.values, self.kind)
        if other is not None:
            wrong = report_kind(Span.of_file(located.name), self.kind, other)
            self.report(link.file, link.path, "P014", wrong.message, wrong.help)
            return None
        version = check_version(source, DOCUMENTS[self.kind])
        if version is not None:
            self.diagnostics.append(version)
        return source

    def rebase(self, tree: Node, reference: str, located: Located) -> Node:
        """Make the paths of an inherited plan relative to the extending file's folder."""
        for path in _REFERENCES if self.kind == "plan" else ():
            node, rest = find_node(tree, path)
            if rest or not isinstance(node.scalar, str):
                continue
            try:
                text = self.rebase_text(node.scalar, path[-1], reference, located)
            except UserError as error:
                place = node.places[-1]
                self.report_all(error, place.file.spans.find_value(place.path), path)
            else:
                tree = replace_node(tree, path, replace(node, scalar=text))
        return tree

    def rebase_text(self, text: str, key: str, reference: str, located: Located) -> str:
        if has_scheme(text) or not text or text.startswith("/"):
            return text
        if key not in _PLAIN_PATHS and not is_path(text):
            return text
        if located.reference is not None:
            if self.resolver is None or key in _PLAIN_PATHS:
                return text
            return self.resolver.join(located.reference, text)
        folder = posixpath.dirname(reference)
        if not reference.endswith(".toml"):  # a short name: a document that comes with pi2
            folder = str(located.path.parent)
        return posixpath.join(folder, text.removeprefix("./")) if folder not in ("", ".") else text

    def remove(self, base: Node, source: SourceFile, index: int, text: str) -> Node:
        """The inherited values without the one that an entry of ``remove`` names."""
        names = parse_key(text)
        if names is None:
            message = f"{write_value(text)} is no key path"
            self.report(source, ("remove", index), "P023", message, 'for example "units.npu"')
            return base
        result = remove_node(base, names)
        if isinstance(result, Node):
            self.removed.append(Removal(source, index, tuple(names)))
            return result
        known = list_names(_find_named(base, names[:result]))
        near = suggest(names[result], known)
        help_text = None
        if near is not None:
            help_text = f"did you mean `{'.'.join([*names[:result], near])}`?"
        elif known:
            help_text = f"inherited are {', '.join(f'`{item}`' for item in known[:8])}"
        place = f" in `{'.'.join(names[:result])}`" if result else ""
        message = f"nothing to remove: no `{names[result]}` is inherited{place}"
        self.report(source, ("remove", index), "P023", message, help_text)
        return base

    def check_joins(self, source: SourceFile, joins: Any, base: Node, own: Node) -> None:
        """Report entries of ``inherit`` that join nothing."""
        for path, value in _list_leaves(joins):
            place = ("inherit", *path)
            shown = format_path(path)
            if value not in JOINS:
                message = f"`{format_path(place)}` is `append` or `prepend`"
                self.report(source, place, "P104", message, "tables merge without it")
                continue
            for tree, what in ((own, "this document sets no array"), (base, "inherited is none")):
                node, rest = find_node(tree, path)
                if rest or node.items is None:
                    message = f"`{shown}` joins no arrays: {what}"
                    self.report(source, place, "P024", message, "name an array that both have")
                    break


def parse_key(text: str) -> list[str] | None:
    """Names of a dotted TOML key, such as ``units."npu.v2"``; None for any other text."""
    if "\n" in text or "=" in text or "#" in text:
        return None
    try:
        values: Any = tomli.loads(f"{text} = 0")
    except (tomli.TOMLDecodeError, RecursionError, ValueError):
        return None
    names = []
    while isinstance(values, dict):
        if len(values) != 1:
            return None
        ((name, values),) = values.items()
        names.append(name)
    return names


def _find_named(node: Node, names: Sequence[str]) -> Node:
    for name in names:
        if node.table is not None:
            node = node.table[name]
        else:
            node = next(item for item in node.items or () if item.id == name)
    return node


def _list_leaves(values: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _list_leaves(value, (*path, key))
        else:
            yield (*path, key), value


_REPLACES = "replaces it by"


@dataclass(frozen=True)
class Step:
    """What one file, or ``--set``, says about a value."""

    place: str
    """The place of the step: ``file:line:column``, or ``--set:1:3``."""
    file: str
    verb: str
    """The step's verb: ``sets``, ``replaces it by``, ``adds to``, ``appends`` or ``prepends``."""
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
    return len({item.places[0].file.name for item in node.items or ()}) > 1


def _is_replaced(source: SourceFile, path: KeyPath) -> bool:
    return any(path[:end] in source.replaced for end in range(1, len(path) + 1))


def _trace_own_text(source: SourceFile, path: KeyPath) -> list[Step]:
    """What a plain file says of a value that ``--set`` replaces."""
    from pi2.plan.toml.source import parse_source

    original = parse_source(source.path, source.name, source.text)
    return [] if isinstance(original, list) else list(trace_value(original, path))
