"""How formats are unpacked to bytes and scales: a module each, with ``UNPACKINGS`` by name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from pi2.backends.blocks.unpacking.block import Unpacking
from pi2.formats import Format

__all__ = ["Unpacking", "find_unpacking", "list_unpackings"]


@cache
def list_unpackings() -> dict[str, Unpacking]:
    found: dict[str, Unpacking] = {}
    for module in sorted(item.name for item in pkgutil.iter_modules(__path__)):
        found |= getattr(importlib.import_module(f"{__name__}.{module}"), "UNPACKINGS", {})
    return found


def find_unpacking(own: Format) -> Unpacking:
    return list_unpackings()[own.name]
