"""A GGUF file that is run as it is, as far as a plan has to know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pi2.plan.arithmetic.units import Needs
from pi2.plan.documents.model import Model


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What the metadata and the list of tensors say."""

    path: Path
    model_id: str
    matrices: int
    """Matrices, those of all experts of a layer counted once."""
    matrix_bytes: int
    token_bytes: int
    """Bytes that a token reads of them: the embedding is looked up where it is not the head."""
    streamed_bytes: int
    """Bytes of those that are not resident: what each step reads."""
    needs: Needs
    """Bytes that the segments need at least."""
    source: object = field(default=None, compare=False, repr=False)
    """The open file, for what runs the plan."""


@dataclass(frozen=True, kw_only=True)
class FilledPlan:
    """A plan for a GGUF file with every value that it did not state."""

    values: dict[str, Any]
    model: Model
    facts: FileFacts


FillPlan = Callable[[Mapping[str, Any], Path], FilledPlan]
"""Completes the values of a plan that has ``weights`` and lies at a path; raises `UserError`."""
