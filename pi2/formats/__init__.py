"""Number formats of weights: blocks as GGUF files have them, ``find_format("q4_k")``, and packed
vectors as stores have them, ``find_packing("int4")``.

A module of this folder that has ``FORMATS`` or ``PACKINGS`` adds formats; nothing else lists them.
Sizes need no numpy, which is imported where numbers are decoded."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from pi2.formats.format import Activations, Format
from pi2.formats.packing import Packing, Use

__all__ = [
    "Activations",
    "Format",
    "Packing",
    "find_format",
    "find_packing",
    "list_formats",
    "list_packings",
    "list_published",
    "name_packings",
]


def _list_all(kind: str) -> dict[str, Any]:
    modules = (
        importlib.import_module(f"{__name__}.{module}")
        for module in sorted(item.name for item in pkgutil.iter_modules(__path__))
    )
    return {own.name: own for module in modules for own in getattr(module, kind, ())}


@cache
def list_formats() -> Mapping[str, Format]:
    """Return all formats of blocks by name."""
    return _list_all("FORMATS")


def find_format(name: str) -> Format:
    """Return the format of blocks ``name``, in lower case; KeyError if there is none."""
    return list_formats()[name]


@cache
def list_packings() -> Mapping[str, Packing]:
    """Return all formats of packed vectors by name, smallest first."""
    return dict(sorted(_list_all("PACKINGS").items(), key=lambda item: item[1].bits))


@cache
def list_published() -> Mapping[str, Packing]:
    """Return the formats of packed vectors that checkpoints come in, the widest first."""
    kept = {name: own for name, own in list_packings().items() if own.is_published}
    return dict(reversed(kept.items()))


def find_packing(name: str) -> Packing:
    """Return the format of packed vectors ``name``; KeyError if there is none."""
    return list_packings()[name]


def name_packings(use: Use) -> tuple[str, ...]:
    """Return the names of the formats that a model's tensors may have."""
    return tuple(name for name, own in list_packings().items() if use in own.uses)
