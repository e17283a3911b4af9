"""Devices to choose from: those that pi2 ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pi2.plan.reading.references import list_shipped
from pi2.plan.toml.source import parse_source


@dataclass(frozen=True)
class Row:
    """A device of the catalogue."""

    reference: str
    """Reference that a plan writes."""
    name: str
    """Display name of the device."""
    description: str


def search_profiles(words: Sequence[str]) -> list[Row]:
    """Devices whose name or description has every word."""
    rows = [_describe(name, path) for name, path in list_shipped("device").items()]
    return [row for row in rows if all(_has_word(row, word) for word in words)]


def _has_word(row: Row, word: str) -> bool:
    text = f"{row.reference} {row.name} {row.description}".casefold()
    return word.casefold() in text


def _describe(reference: str, path: Path) -> Row:
    source = parse_source(path, reference, path.read_text("utf-8"))
    assert not isinstance(source, list), source
    name, text = (" ".join(source.values.get(key, "").split()) for key in ("name", "description"))
    return Row(reference=reference, name=name, description=text[:200])
