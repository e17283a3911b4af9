"""Figures of documents that a prediction rests on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a document that was used."""

    name: str
    status: str
    source: str


def describe_statuses(figures: tuple[Figure, ...]) -> str:
    """One line on where the figures come from."""
    counts: dict[str, int] = {}
    for item in figures:
        counts[item.status] = counts.get(item.status, 0) + 1
    parts = [f"{count} {status}" for status, count in sorted(counts.items())]
    return f"{len(figures)} figures of device and model: {', '.join(parts)}"
