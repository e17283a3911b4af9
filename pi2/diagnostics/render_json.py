"""JSON format: an array of objects with the members of `Diagnostic`, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pi2.diagnostics.diagnostic import Diagnostic


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
) -> str:
    """Write an array, empty if there is nothing to report; no colours, no sources."""
    del colour, sources
    items = [asdict(item) for item in diagnostics]
    return json.dumps(items, indent=2, ensure_ascii=False) + "\n"
