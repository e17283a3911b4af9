"""JSON format: an array of objects with the members of `Diagnostic`, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pi2.diagnostics.diagnostic import Diagnostic

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write an array, empty if there is nothing to report; only the diagnostics are used."""
    del colour, sources, find_page
    items = [asdict(item) for item in diagnostics]
    return json.dumps(items, indent=2, ensure_ascii=False) + "\n"
