"""Where a matrix lies in a file, in the format that it has there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pi2.memory.expert_slots import ExpertMatrix

PIECE_BYTES = 1 << 20
"""Bytes of a streamed tensor that are read and computed together, in whole rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A matrix as its file has it: ``rows`` rows of ``row_bytes``, one after the other."""

    name: str
    """What the file calls it."""
    file: int
    """Number of its file among `GgufWeights.files`."""
    offset: int
    """Byte of the file where it begins."""
    format: str
    """Number format, such as ``q4_k``."""
    rows: int
    """Rows, those of all experts together."""
    length: int
    """Numbers of a row."""
    row_bytes: int
    experts: int = 1
    """Matrices that lie one after the other."""
    has_neighbours: bool = False
    """Whether rows that rotate together follow each other (Llama's queries and keys)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


def describe_experts(tensors: Sequence[FileTensor]) -> list[ExpertMatrix]:
    """Where the experts of a layer lie."""
    return [
        ExpertMatrix(tensor.file, tensor.offset, tensor.size_bytes // tensor.experts)
        for tensor in tensors
    ]
