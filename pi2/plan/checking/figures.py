"""Figures with an origin, wherever they stand in a document, and all texts of a document."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from pi2.plan.documents.common import Origin
from pi2.plan.toml.paths import KeyPath


def walk_figures(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Origin]]:
    """Every figure below ``value`` with its key path."""
    for place, item in walk_values(value, path):
        if isinstance(item, Origin):
            yield place, item


def walk_texts(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text below ``value`` with its key path."""
    for place, item in walk_values(value, path):
        if isinstance(item, str):
            yield place, item


def walk_values(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """``value`` and everything below it; values that nobody wrote, too."""
    yield path, value
    if isinstance(value, BaseModel):
        for name, item in value:
            yield from walk_values(item, (*path, name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk_values(item, (*path, str(key)))
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from walk_values(item, (*path, number))
