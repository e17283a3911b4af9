"""A document as an editor has it, checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import tomli

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.diagnostics.ignores import ProjectSettings, read_project, sift
from pi2.lsp.place import contains
from pi2.plan.checking.check import Report
from pi2.plan.reading.references import Located, UnknownName, locate_document
from pi2.plan.toml.paths import KeyPath
from pi2.plan.toml.source import Kind, SourceFile, detect_kind, read_source
from pi2.plan.toml.spans import SpanIndex, index_spans
from pi2.sharing.resolver import LockedReferences
from pi2.store.agreement import list_store_findings
from pi2.weights.file_reading import check_document

MAX_CHARACTERS, MAX_COLUMNS = 200_000, 4_000
"""Longer texts and lines get findings, and no help: they come from programs."""


@dataclass(frozen=True)
class Checked:
    """A text, and all that is known of it."""

    path: Path
    text: str

    @property
    def kind(self) -> Kind | None:
        """Kind of document, by the file's name."""
        return detect_kind(self.path.name)

    @property
    def resolver(self) -> LockedReferences:
        """Resolver of references, without a network."""
        return LockedReferences(self.path.parent)

    @cached_property
    def report(self) -> Report:
        """Report of `pi2 validate`."""
        report = check_document(
            self.path, name=str(self.path), resolver=self.resolver, text=self.text
        )
        own = str(self.path)
        found = (*report.diagnostics, *list_store_findings(report))
        sifted = sift(found, report.sources, [own], _read_project(self.path.parent))
        return replace(report, diagnostics=sifted.diagnostics)

    @cached_property
    def spans(self) -> SpanIndex:
        """Places of keys and values in this text; none where nobody wrote it."""
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
        """The innermost key or value at a place, counted from 1 in characters."""
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
        """The file that the reference at ``path`` means, if it is there."""
        text = self.read_text(path)
        if not text:
            return None
        try:
            located = locate_document(text, kind, self.path.parent, resolver=self.resolver)
        except (UnknownName, UserError):
            return None
        return located if located.path.is_file() else None

    def list_units(self) -> list[str]:
        """Names of the units of the plan's device."""
        device = self.report.files.get("device")
        values = None if device is None else device.values
        if values is None:
            located = self.find_document(("device",), "device")
            source = None if located is None else read_source(located.path, located.name)
            values = source.values if isinstance(source, SourceFile) else {}
        units = values.get("units")
        return [str(name) for name in units] if isinstance(units, dict) else []

    def list_findings(self) -> Iterator[tuple[Span, Diagnostic]]:
        """Findings with their places in this text; those in other files stand where this one
        names the file, or at its beginning."""
        own = str(self.path)
        for item in self.report.diagnostics:
            if item.span is not None and item.span.file == own:
                yield item.span, item
            else:
                yield self._find_reason(item), item

    def _find_reason(self, item: Diagnostic) -> Span:
        """Place where this text names the file that a finding is in."""
        if item.span is not None:
            for kind in ("device", "model"):
                source = self.report.files.get("device" if kind == "device" else "model")
                if source is not None and source.name == item.span.file:
                    return self.spans.find_value((kind,))
        if ("extends",) in self.spans.values:
            return self.spans.values["extends",]
        return Span.of_file(str(self.path))


def _read_project(folder: Path) -> ProjectSettings:
    """The project's settings; none while somebody is writing them."""
    try:
        return read_project(folder)
    except UserError:
        return ProjectSettings()
