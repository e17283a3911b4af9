"""What the segments of a plan need."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Need:
    """Bytes that a segment needs, and why."""

    bytes: int
    explanation: str


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes needed per segment; ``cold`` is the smallest cache that works."""

    attention: Need
    kv: Need
    state: Need
    predictor: Need
    hot: Need
    cold: Need
    workspace: Need

    def items(self) -> list[tuple[str, Need]]:
        """Segments by name."""
        return [(item.name, getattr(self, item.name)) for item in fields(self)]
