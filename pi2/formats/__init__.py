"""Number formats of weights, by the names that GGUF files have for them: ``find_format("q4_k")``.

A module of this folder that has ``FORMATS`` adds formats; nothing else lists them.  Sizes need no
numpy, which is imported where numbers are decoded.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from pi2.formats.format import Activations, Format

__all__ = ["Activations", "Format", "find_format", "list_formats"]


@cache
def list_formats() -> Mapping[str, Format]:
    """Return all formats by name."""
    found: dict[str, Format] = {}
    for module in sorted(item.name for item in pkgutil.iter_modules(__path__)):
        for own in getattr(importlib.import_module(f"{__name__}.{module}"), "FORMATS", ()):
            found[own.name] = own
    return found


def find_format(name: str) -> Format:
    """Return the format ``name``, in lower case; KeyError if there is none."""
    return list_formats()[name]
