"""Output formats of diagnostics: one ``render_*.py`` module each, found by being here.

A module has ``render(diagnostics, *, colour, sources, find_page) -> str``; the text ends with a
newline unless it is empty.  ``find_page`` looks up what there is to say about a code.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import pi2.diagnostics
from pi2.diagnostics.diagnostic import Diagnostic

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage

_PREFIX = "render_"


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
    """Names of the formats."""
    found = pkgutil.iter_modules(pi2.diagnostics.__path__)
    return [item.name.removeprefix(_PREFIX) for item in found if item.name.startswith(_PREFIX)]


def find_renderer(name: str) -> Renderer:
    """Renderer of the format ``name``."""
    module = importlib.import_module(f"pi2.diagnostics.{_PREFIX}{name}")
    renderer: Renderer = module.render
    return renderer
