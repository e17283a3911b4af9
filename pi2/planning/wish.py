"""What somebody wants a plan for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.reading.thresholds import Thresholds

Objective = Literal["speed", "memory", "energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Limits, what to make the best of within them, and what the plan is for."""

    device: Device
    model: Model
    memory_bytes: int | None = None
    """Maximum resident set size of the process."""
    unit_memory: Mapping[str, int] = field(default_factory=dict)
    """Most bytes of units that have memory of their own, by name; else all that they have."""
    tokens_s: float | None = None
    """Lowest speed of generation, of all sequences together."""
    objective: Objective = "speed"
    context: int = 4096
    """Context length in tokens, prompt and answer together."""
    exact: bool = False
    """Only choices that do not change the result: all gates, fp16 keys and values, no looking
    ahead."""
    leave_out: float = 0.0
    """Share of the predictor's scores that a plan may leave out instead of reading neurons."""
    batch: int = 1
    """Sequences that generate at the same time."""
    store: Path | None = None
    """Neuron store whose activations count, where there is one."""
    thresholds: Thresholds | None = None
    """Thresholds for a mixture's experts, which a plan may use where it is faster with them."""
    thresholds_file: str = ""
    """Their file, as the plan is to name it."""
