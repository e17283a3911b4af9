"""A GGUF file that is run as it is, as far as a plan has to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pi2.plan.arithmetic.units import Needs
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import approximate_bytes


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What the metadata and the list of tensors say."""

    path: Path
    model_id: str
    matrices: int
    """Matrices, those of all experts of a layer counted once."""
    matrix_bytes: int
    token_bytes: int
    """Bytes that a token reads of them: the embedding is looked up where it is not the head, and of
    experts some are chosen."""
    streamed_bytes: int
    """Bytes of dense ones that are not resident: what each step reads."""
    expert_bytes: int = 0
    """Bytes of experts that come into slots when they are chosen; 0 where all are resident."""
    slot_bytes: int = 0
    """Bytes of these slots."""
    needs: Needs
    """Bytes that the segments need at least."""
    source: object = field(default=None, compare=False, repr=False)
    """The open file, for what runs the plan."""

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that memory has no room for."""
        return self.streamed_bytes + max(0, self.expert_bytes - self.slot_bytes)

    def describe_missing(self) -> str:
        """What comes from disk, where something does."""
        parts = []
        if self.streamed_bytes:
            parts.append(f"{approximate_bytes(self.streamed_bytes)} are read for every step")
        if self.expert_bytes:
            experts, slots = map(approximate_bytes, (self.expert_bytes, self.slot_bytes))
            parts.append(f"{experts} are experts, of which memory has {slots} at a time")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class FilledPlan:
    """A plan for a GGUF file with every value that it did not state."""

    values: dict[str, Any]
    model: Model
    facts: FileFacts


class FillPlan(Protocol):
    """What is known of this machine's files and memory."""

    def __call__(self, values: Mapping[str, Any], path: Path) -> FilledPlan:
        """Complete the values of a plan that has ``weights`` and lies at a path; `UserError`."""
        ...

    def find_memory(self) -> tuple[int, int]:
        """Installed and free memory, in bytes."""
        ...
