"""The exception that carries diagnostics: the user's mistake, never a programmer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pi2.diagnostics.diagnostic import Diagnostic, Span

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

    def _summarise(self) -> str:
        """Text for people who see the exception itself, such as users of the Python API."""
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
        """Make an error of one diagnostic; ``file`` is what it is about, as a whole."""
        span = None if file is None else Span.of_file(file)
        diagnostic = Diagnostic(
            code=code, message=message, help=help, span=span, notes=tuple(notes)
        )
        return cls([diagnostic], exit_code=exit_code)
