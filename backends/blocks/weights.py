"""What a model's tensors are, wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pi2.arrays import F32, U8
from pi2.formats import Format, find_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor as it lies in a file: ``rows`` of ``length`` elements, one after another."""

    format: str
    """A name of `pi2.formats`."""
    rows: int
    length: int
    data: U8 | None = None
    """Its bytes, mapped or read; None where `BlockModel.set_tensor` says where they are before
    the instructions run that read them."""
    experts: int = 1
    """Matrices of so many rows that follow each other."""
    added: float = 0.0
    """Constant that elements of a vector are stored without."""
    neighbours: bool = False
    """Whether elements of a head that follow each other turn together, whatever the model document
    says of the checkpoint."""

    @property
    def kind(self) -> Format:
        """The format."""
        return find_format(self.format)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.kind.count_bytes(self.length)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self.rows * self.experts

    def read(self) -> F32:
        """Return the elements of a vector, flat."""
        assert self.data is not None, "vectors are in memory"
        raw = np.asarray(self.data).reshape(-1)[: self.size_bytes]
        return self.kind.decode(raw).reshape(-1) + np.float32(self.added)


class FindWeight(Protocol):
    """Finds a tensor by the key that `pi2.plan.documents.model_tensors.Tensors` has for its name.

    In a mixture, tensors of experts have all of them (`Weight.experts`).
    """

    def __call__(self, key: str, layer: int, /) -> Weight | None:
        """Return the tensor ``key`` of a layer (0 for the model's own); None if there is none."""
