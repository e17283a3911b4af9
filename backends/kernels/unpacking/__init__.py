"""How kernels read packed vectors: a module for some formats, with ``UNPACKINGS`` by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from pi2.backends.kernels.unpacking.unpacking import Block, Chunk, Unpacking

__all__ = ["Block", "Chunk", "Unpacking", "find_unpacking", "list_unpackings"]


@cache
def list_unpackings() -> Mapping[str, Unpacking]:
    found: dict[str, Unpacking] = {}
    for module in sorted(item.name for item in pkgutil.iter_modules(__path__)):
        found |= getattr(importlib.import_module(f"{__name__}.{module}"), "UNPACKINGS", {})
    return found


def find_unpacking(precision: str) -> Unpacking:
    """Return how vectors of a format are unpacked; KeyError if kernels do not know it."""
    return list_unpackings()[precision]
