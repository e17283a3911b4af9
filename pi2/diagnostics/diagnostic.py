"""A diagnostic: one thing to tell the user, and where in which file it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Span:
    """A range of a text file. Lines and columns count from 1, columns in characters; the end is
    exclusive: a span of one character has ``end_column == column + 1``."""

    file: str
    """File name as the user knows it."""
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    @classmethod
    def of_file(cls, file: str) -> Span:
        """The span that means a file as a whole."""
        return cls(file, 1, 1, 1, 1)

    @property
    def is_whole_file(self) -> bool:
        """Whether it means the file as a whole."""
        return (self.line, self.column, self.end_line, self.end_column) == (1, 1, 1, 1)

    @property
    def place(self) -> str:
        """``file:line:column``, or only the file if the whole of it is meant."""
        return self.file if self.is_whole_file else str(self)


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One finding.

    Codes: P0xx reading and syntax, P1xx schema, P2xx whole plan, P3xx device fit, P4xx provenance,
    P5xx store and checkpoint, P6xx running, P7xx sharing and editors, P9xx internal."""

    code: str
    severity: Severity = "error"
    message: str
    """One line, lower case, no full stop: the fault."""
    help: str | None = None
    """Advice in one line: what to do."""
    span: Span | None = None
    """Place to change something."""
    notes: tuple[str, ...] = ()
    """Origins (related places, each ``file:line:column: text``) and further facts."""
    path: str | None = None
    """Key path in the document, such as ``layers.overrides.0.select``."""


def label_note(note: str) -> str:
    """The note with a word before it: an origin names a place in a document, others do not."""
    place = note.split(": ", 1)[0].split(":")[0]
    return f"{'origin' if place.endswith('.toml') or place == '--set' else 'note'}: {note}"


def sort_diagnostics(diagnostics: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    """Order by file, place and code; files keep the order in which they first appear."""
    files: dict[str, int] = {}
    for diagnostic in diagnostics:
        if diagnostic.span is not None:
            files.setdefault(diagnostic.span.file, len(files))

    def rank(item: Diagnostic) -> tuple[int, int, int, str, str]:
        span = item.span
        if span is None:
            return (-1, 0, 0, item.code, item.message)
        return (files[span.file], span.line, span.column, item.code, item.message)

    return tuple(sorted(diagnostics, key=rank))


FINDINGS = 1
"""Exit code: the files were read and have errors."""
CANNOT_RUN = 2
"""Exit code: usage, an unreadable file, a machine that cannot do it."""


class UserError(Exception):
    """Everything that is the user's mistake; the command line prints it and exits."""

    def __init__(
        self,
        diagnostics: Sequence[Diagnostic],
        *,
        exit_code: int = FINDINGS,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        """``sources``: texts that are not files on disk, such as ``--set``, by their name."""
        assert diagnostics, "a UserError needs at least one diagnostic"
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        self.exit_code = exit_code
        self.sources: Mapping[str, str] = MappingProxyType(dict(sources or {}))
        super().__init__(self._summarise())

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), exit_code=self.exit_code, sources=dict(self.sources))
        return make, (self.diagnostics,)

    def _summarise(self) -> str:
        lines = []
        for item in self.diagnostics:
            place = f"{item.span.place}: " if item.span is not None else ""
            lines.append(f"{place}{item.severity}[{item.code}]: {item.message}")
            if item.help is not None:
                lines.append(f"  help: {item.help}")
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        code: str,
        message: str,
        *,
        help: str | None = None,
        file: str | None = None,
        exit_code: int = CANNOT_RUN,
        notes: Sequence[str] = (),
    ) -> UserError:
        """Make an error of one diagnostic; ``file`` is its subject as a whole."""
        span = None if file is None else Span.of_file(file)
        diagnostic = Diagnostic(
            code=code, message=message, help=help, span=span, notes=tuple(notes)
        )
        return cls([diagnostic], exit_code=exit_code)
