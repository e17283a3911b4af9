"""A document as an editor has it, checked."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import tomli
from pygls.workspace import PositionCodec

from pi2.authoring.explanation import FieldDoc, describe_field, write_chain
from pi2.authoring.writing import list_costs
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.diagnostics.baseline import ProjectSettings, read_project, sift
from pi2.fitting.check import Report
from pi2.fitting.misfits import list_store_findings
from pi2.plan.reading.compose import trace_value
from pi2.plan.reading.references import (
    WRITTEN,
    Located,
    UnknownName,
    locate_document,
    read_document,
)
from pi2.plan.toml.source import Kind, SourceFile, detect_kind
from pi2.plan.toml.spans import SpanIndex, index_spans
from pi2.plan.toml.text import KeyPath, format_path, write_text
from pi2.sharing.references import LockedReferences
from pi2.weights.file_reading import check_document


@dataclass(frozen=True)
class Lines:
    """The lines of a text, with columns counted as an editor counts them."""

    text: str
    codec: PositionCodec

    @property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.split("\n")

    def find_offset(self, line: int, column: int) -> int:
        """Offset of a place of the protocol, both counted from 0; the nearest there is."""
        lines = self.lines
        if line >= len(lines):
            return len(self.text)
        before = sum(len(item) + 1 for item in lines[:line])
        units = 0
        for number, char in enumerate(lines[line]):
            if units >= column:
                return before + number
            units += self.codec.client_num_units(char)
        return before + len(lines[line])

    def count_column(self, line: int, characters: int) -> int:
        lines = self.lines
        text = lines[line] if line < len(lines) else ""
        units: int = self.codec.client_num_units(text[:characters])
        return units

    def convert_span(self, span: Span) -> tuple[int, int, int, int]:
        """First line and column, last line and column, from 0; a whole file is its first line."""
        if span.is_whole_file:
            return 0, 0, 0, self.count_column(0, len(self.lines[0]))
        return (
            span.line - 1,
            self.count_column(span.line - 1, span.column - 1),
            span.end_line - 1,
            self.count_column(span.end_line - 1, span.end_column - 1),
        )

    def convert_offset(self, offset: int) -> tuple[int, int]:
        before = self.text[:offset]
        line = before.count("\n")
        return line, self.count_column(line, len(before) - before.rfind("\n") - 1)


def contains(span: Span, line: int, column: int) -> bool:
    """Whether a place, counted from 1 in characters, is in or at the end of ``span``."""
    start, end = (span.line, span.column), (span.end_line, span.end_column)
    return not span.is_whole_file and start <= (line, column) <= end


MAX_CHARACTERS, MAX_COLUMNS = 200_000, 4_000
"""Longer texts and lines get findings, and no help: they come from programs."""


@dataclass(frozen=True)
class Checked:
    path: Path
    text: str

    @property
    def kind(self) -> Kind | None:
        return detect_kind(self.path.name)

    @property
    def resolver(self) -> LockedReferences:
        """Resolver of references, without a network."""
        return LockedReferences(self.path.parent)

    @cached_property
    def report(self) -> Report:
        report = check_document(
            self.path, name=str(self.path), resolver=self.resolver, text=self.text
        )
        own = str(self.path)
        found = (*report.diagnostics, *list_store_findings(report))
        sifted = sift(found, report.sources, [own], _read_project(self.path.parent))
        return replace(report, diagnostics=sifted.diagnostics)

    @cached_property
    def spans(self) -> SpanIndex:
        """Places of keys and their values in this text; none if it was not written."""
        name = str(self.path)
        return index_spans(name, self.text) if self.is_written_by_people else SpanIndex(name)

    @cached_property
    def is_written_by_people(self) -> bool:
        """Whether it is worth a look for help: neither huge nor nested without end."""
        longest = max(len(line) for line in self.text.split("\n"))
        if len(self.text) > MAX_CHARACTERS or longest > MAX_COLUMNS:
            return False
        return all(item.code != "P012" for item in self.report.diagnostics)

    @property
    def source(self) -> SourceFile | None:
        """The document's values with their places; None while they cannot be read."""
        return None if self.kind is None else self.report.files.get(self.kind)

    def find_path(self, line: int, column: int) -> tuple[KeyPath, Span] | None:
        best: tuple[KeyPath, Span] | None = None
        for spans in (self.spans.keys, self.spans.values):
            for path, span in spans.items():
                if contains(span, line, column) and (best is None or len(path) > len(best[0])):
                    best = path, span
        return best

    def read_text(self, path: KeyPath) -> str | None:
        """The text that this file has at ``path``, even where the file is broken elsewhere."""
        span = self.spans.values.get(path)
        if span is None or span.line != span.end_line:
            return None
        line = self.text.split("\n")[span.line - 1]
        written = line[span.column - 1 : span.end_column - 1]
        if written[:1] not in ('"', "'"):
            return None
        try:
            value = tomli.loads(f"value = {written}")["value"]
        except ValueError:
            return None
        return value if isinstance(value, str) else None

    def find_document(self, path: KeyPath, kind: Kind) -> Located | None:
        """The file that the reference at ``path`` means, if it exists."""
        text = self.read_text(path)
        if not text:
            return None
        try:
            located = locate_document(text, kind, self.path.parent, resolver=self.resolver)
        except (UnknownName, UserError):
            return None
        return located if located.path.is_file() else None

    def list_units(self) -> list[str]:
        device = self.report.files.get("device")
        values = None if device is None else device.values
        if values is None:
            located = self.find_document(("device",), "device")
            source = None
            if located is not None:
                source = read_document(located.path, located.name, ".device.toml")
            values = source.values if isinstance(source, SourceFile) else {}
        units = values.get("units")
        return [str(name) for name in units] if isinstance(units, dict) else []

    def list_findings(self) -> Iterator[tuple[Span, Diagnostic]]:
        """Findings with their place in this text, or the place that names the other file."""
        own = str(self.path)
        for item in self.report.diagnostics:
            if item.span is not None and item.span.file == own:
                yield item.span, item
            else:
                yield self._find_reason(item), item

    def _find_reason(self, item: Diagnostic) -> Span:
        if item.span is not None:
            for kind, source in self.report.files.items():
                if kind != "plan" and source.name == item.span.file:
                    return self.spans.find_value((kind,))
        if ("extends",) in self.spans.values:
            return self.spans.values["extends",]
        return Span.of_file(str(self.path))


def _read_project(folder: Path) -> ProjectSettings:
    """The project's settings; none while they are being written."""
    try:
        return read_project(folder)
    except UserError:
        return ProjectSettings()


def explain_place(checked: Checked, line: int, column: int) -> tuple[Span, str] | None:
    kind = checked.kind
    found = checked.find_path(line, column)
    if kind is None or found is None:
        return None
    path, span = found
    doc = describe_field(WRITTEN[kind], path)
    if doc is None:
        return None
    parts = [f"**`{format_path(path)}`** — {doc.text}", _write_values(doc)]
    origins = list(_write_origins(checked, path))
    if origins:
        parts.append("\n".join(["Set by:", *origins]))
    resolved = checked.report.resolved
    costs = [] if resolved is None else list(list_costs(resolved, path))
    if costs and kind == "plan":
        parts.append("\n".join(f"- {cost}" for cost in costs))
    return span, "\n\n".join(parts)


def _write_values(doc: FieldDoc) -> str:
    words = [doc.values]
    if doc.default is not None:
        words.append(f"default `{doc.default}`")
    elif doc.is_required:
        words.append("required")
    if doc.examples:
        words.append("for example " + ", ".join(f"`{item}`" for item in doc.examples))
    return "; ".join(words)


def _write_origins(checked: Checked, path: KeyPath) -> Iterator[str]:
    source = checked.source
    if source is None:
        return
    folder = f"{checked.path.parent}/"
    for text in write_chain(trace_value(source, path)):
        yield f"- {text.removeprefix(folder)}"


MANIFEST = "manifest.json"


def find_definition(checked: Checked, line: int, column: int) -> tuple[Path, Span] | None:
    found = checked.find_path(line, column)
    kind = checked.kind
    if found is None or kind is None:
        return None
    path = found[0]
    if path[:1] == ("extends",):
        return _find_document(checked, path, kind)
    if kind != "plan":
        return None
    if path in (("device",), ("model",)):
        return _find_document(checked, path, "device" if path == ("device",) else "model")
    if path == ("weights",):
        text = checked.read_text(path)
        target = checked.path.parent / (text or "") / MANIFEST
        return (target, Span.of_file(str(target))) if text and target.is_file() else None
    if path[-2:-1] == ("split",):
        return _find_unit(checked, str(path[-1]))
    return None


def _find_document(checked: Checked, path: KeyPath, kind: Kind) -> tuple[Path, Span] | None:
    located = checked.find_document(path, kind)
    return None if located is None else (located.path, Span.of_file(str(located.path)))


def _find_unit(checked: Checked, name: str) -> tuple[Path, Span] | None:
    device = checked.report.files.get("device")
    if device is None or not device.spans.has(("units", name)):
        return None
    span = device.spans.find_value(("units", name))
    if span.file == device.name:
        return device.path, span
    path = Path(span.file)
    return (path, span) if path.is_file() else None


_VALUE = r"""(?P<value>"[^"]*"|true|false|[0-9]+(?:\.[0-9]+)?(?![\w.]))"""
_KEYED = re.compile(rf"\bwrite (?P<key>[\w-]+) = {_VALUE}")
_BARE = re.compile(rf"\bwrite {_VALUE}")
_MEANT = re.compile(r"""did you mean (?:`(?P<name>[^`]+)`|(?P<value>"[^"]+"))\?""")
_CHANGED = re.compile(
    r"\b(?:raise|lower) (?:the )?(?P<key>[\w-]+) to (?P<amount>[0-9.]*[0-9](?: [A-Za-z]+)?)"
)
_MISSING = re.compile(r"for example `(?P<line>[\w-]+ = [^`]+)`")


@dataclass(frozen=True)
class Fix:
    """One change that a finding suggests."""

    title: str
    span: Span
    """The replaced text; without width for an insertion."""
    text: str


def list_fixes(checked: Checked, span: Span, item: Diagnostic) -> Iterator[Fix]:
    """Changes that the help of ``item``, which stands at ``span`` of the text, suggests."""
    if item.help is None or span.is_whole_file or span.line != span.end_line:
        return
    old = _read(checked, span)
    for match in _MEANT.finditer(item.help):
        name = match["value"] or match["name"]
        if match["value"] is None and old[:1] in ('"', "'"):
            name = write_text(name)
        yield Fix(f"Write {name}", span, name)
    if _is_value(old):
        for match in _KEYED.finditer(item.help):
            if (item.path or "").rpartition(".")[2] == match["key"]:
                yield Fix(f"Write {match['key']} = {match['value']}", span, match["value"])
        for match in _BARE.finditer(item.help):
            yield Fix(f"Write {match['value']}", span, match["value"])
    for match in _CHANGED.finditer(item.help):
        place = _find_key(checked, item, match["key"])
        if place is not None:
            path, other = place
            quoted = _read(checked, other)[:1] in ('"', "'")
            value = write_text(match["amount"]) if quoted else match["amount"]
            yield Fix(f"Write {format_path(path)} = {value}", other, value)
    line = checked.text.split("\n")[span.line - 1]
    missing = _MISSING.search(item.help)
    if item.code == "P102" and missing is not None and line.lstrip().startswith("["):
        end = len(line) + 1
        below = Span(span.file, span.line, end, span.line, end)
        yield Fix(f"Add {missing['line']}", below, f"\n{missing['line']}")


def _read(checked: Checked, span: Span) -> str:
    line = checked.text.split("\n")[span.line - 1]
    return line[span.column - 1 : span.end_column - 1]


def _is_value(text: str) -> bool:
    """Whether a text is a TOML value, or a number with a unit but without quotes."""
    if text[:1] in ("[", "{") or "=" in text:
        return False
    if text[:1].isdigit():
        return True
    try:
        tomli.loads(f"value = {text}")
    except ValueError:
        return False
    return True


def _find_key(checked: Checked, item: Diagnostic, key: str) -> tuple[KeyPath, Span] | None:
    """The only value of this text that is called ``key``, in the table that a finding is about."""
    table = (item.path or "").partition(".")[0]
    found = [
        (path, span)
        for path, span in checked.spans.values.items()
        if path and path[-1] == key and path[0] == table and span.line == span.end_line
    ]
    return found[0] if len(found) == 1 else None
