"""Output formats of diagnostics: functions ``render_NAME``, imported when they are asked for.

Each is a `Renderer`; its text ends with a newline unless it is empty.  ``find_page`` looks up what
there is to say about a code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pi2.diagnostics.diagnostic import Diagnostic

if TYPE_CHECKING:
    from pi2.diagnostics.texts import FindPage

_TEXTS, _REPORTS = "pi2.diagnostics.texts", "pi2.diagnostics.reports"
_HOMES = {
    **dict.fromkeys(("concise", "full", "json"), _TEXTS),
    **dict.fromkeys(("github", "gitlab", "junit", "sarif"), _REPORTS),
}
"""Modules of the formats by their names."""


class Renderer(Protocol):
    """Writes diagnostics as text."""

    def __call__(
        self,
        diagnostics: Sequence[Diagnostic],
        *,
        colour: bool = False,
        sources: Mapping[str, str] | None = None,
        find_page: FindPage | None = None,
    ) -> str: ...


def list_formats() -> list[str]:
    return sorted(_HOMES)


def find_renderer(name: str) -> Renderer:
    """Renderer of the format ``name``."""
    module = importlib.import_module(_HOMES[name])
    renderer: Renderer = getattr(module, f"render_{name}")
    return renderer
