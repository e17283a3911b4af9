"""Bytes of a program's arrays, by building it without allocating any: plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pi2.backends.blocks.instructions import FindWeight
from pi2.backends.blocks.layers import start_layers
from pi2.backends.blocks.operands import Area, Extent, Matrix
from pi2.backends.blocks.room import Memory
from pi2.plan.documents.model import Model

MOST_LANES = 16
"""Lanes of the widest registers."""


class Uncompiled:
    """An interpreter without kernels: a program can be built with it, and not run."""

    lanes = MOST_LANES

    def find(self, kernel: str, own: str | None = None) -> int:
        return 0

    def run(self, program: int, begin: int, end: int, most: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """What the program of a model takes, without its weights."""

    segments: Mapping[str, int]
    """Bytes by segment."""
    kept: Sequence[Area]
    """What a call has in areas while its neurons are computed elsewhere."""
    keeps_read: bool
    """Whether what neurons read is among it."""
    matrices: Sequence[Matrix]


def count_program(
    model: Model, find: FindWeight, extent: Extent, lanes: int = MOST_LANES
) -> ProgramSize:
    """Return the size of a program; ``find`` may give tensors without their bytes."""
    memory, interpreter = Memory(), Uncompiled()
    interpreter.lanes = lanes
    layers = start_layers(model, find, interpreter, memory, extent)
    layers.add_model()
    return ProgramSize(memory.sizes, layers.list_kept(), layers.keeps_read, layers.builder.matrices)
