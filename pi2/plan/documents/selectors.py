"""Selectors of layers and cores: ``"0-7,28-31"``."""

from __future__ import annotations

from collections.abc import Iterator


def parse_selector(text: str) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of a well-formed selector; a reversed range stays as it is.

    Numbers of absurd length are cut: no model has 10^9 layers.
    """
    ranges = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        low = _parse_number(first)
        ranges.append((low, _parse_number(last) if last else low))
    return ranges


def _parse_number(text: str) -> int:
    return int(text) if len(text) <= 9 else 10**9


def list_layers(text: str, layers: int) -> Iterator[int]:
    """Yield the layers below ``layers`` that a selector names, as often as it names them."""
    for first, last in parse_selector(text):
        yield from range(first, min(last, layers - 1) + 1)


def list_cores(text: str) -> list[int]:
    """Return the cores that a selector names, in its order; none for no text."""
    if not text:
        return []
    return [core for first, last in parse_selector(text) for core in range(first, last + 1)]
