"""Place of a matrix in a file, in its original format, and files of such matrices."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from pi2.arrays import U8
from pi2.backends.blocks.instructions import Weight
from pi2.caches import open_regular, open_stream
from pi2.plan.documents.model import Model
from pi2.reads import read_at, refuse_cut, refuse_weights

if TYPE_CHECKING:
    from pi2.memory.expert_slots import ExpertMatrix

EXPERTS = ("gate", "up", "fused_gate_up", "down")
"""Keys of matrices that experts have each: inputs, then the output."""
PIECE_BYTES = 1 << 20
"""Bytes of a streamed tensor that are read and computed together, in whole rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor(Weight):
    """A matrix as its file has it, or matrices of experts that lie one after the other."""

    file: int
    """Number of its file among `GgufWeights.files`."""
    offset: int
    """Byte of the file where it begins."""
    together: int = 1
    """Rows that are computed together: all of a head that has a matrix of its own."""

    @property
    def all_rows(self) -> int:
        """Rows of all experts together."""
        return self.rows * self.experts


def describe_experts(tensors: Sequence[FileTensor]) -> list[ExpertMatrix]:
    from pi2.memory.expert_slots import ExpertMatrix

    return [
        ExpertMatrix(tensor.file, tensor.offset, tensor.size_bytes // tensor.experts)
        for tensor in tensors
    ]


class TensorFiles(ABC):
    """The files of a model's matrices, which are mapped or read in place."""

    def __init__(self, files: Sequence[Path], model: Model) -> None:
        self.files = files
        self.model = model
        self.shared: Mapping[str, int] = {}
        """Bytes of each matrix that belongs to the model for which this MTP head drafts."""
        self.maps: dict[int, U8] = {}
        """The files that are mapped, by number."""
        self._descriptors: dict[int, int] = {}

    @property
    @abstractmethod
    def vectors(self) -> frozenset[str]:
        """Keys of ``model.tensors`` that name vectors, or small tensors of any shape."""

    @abstractmethod
    def find(self, key: str, layer: int = 0, mixer: int = 0) -> FileTensor | None:
        """The matrix that key ``key`` of ``model.tensors`` names; None if the file has none, or has
        it in an order that must be undone first."""

    def describe(self, key: str, layer: int = 0, mixer: int = 0) -> Weight | None:
        """A program's matrix without its bytes; None of a vector."""
        tensor = None if key in self.vectors else self.find(key, layer, mixer)
        return None if tensor is None or tensor.all_rows == 1 else tensor

    def list_looked_up(self) -> dict[str, int]:
        """Bytes of the own matrices of which a token reads a row, by name: a tied head reads the
        embedding whole."""
        keys = (
            "layer_embedding",
            "positions",
            "ngram_rows",
            *(() if self.model.tied_head else ("embedding",)),
        )
        found = [own for key in keys if (own := self.find(key)) is not None]
        return {own.name: own.size_bytes for own in found if own.name not in self.shared}

    def list_experts(self) -> dict[int, list[FileTensor]]:
        """The matrices of the experts that routers choose, by layer: inputs, then the output."""
        found: dict[int, list[FileTensor]] = {}
        for key in EXPERTS:
            for layer in range(self.model.shape.layers):
                tensor = self.find(key, layer)
                if tensor is not None and tensor.experts > 1:
                    found.setdefault(layer, []).append(tensor)
        return found

    def map_rows(self, tensor: FileTensor) -> U8:
        """The rows uint8 [rows, row_bytes] in the page cache, read-only."""
        if tensor.file not in self.maps:
            with open_stream(self.files[tensor.file]) as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self.maps[tensor.file] = np.frombuffer(mapped, np.uint8)
        flat = self.maps[tensor.file][tensor.offset : tensor.offset + tensor.size_bytes]
        return flat.reshape(tensor.all_rows, tensor.row_bytes)

    def read_rows(self, tensor: FileTensor, rows: Iterable[int]) -> U8:
        """Single rows uint8 [n, row_bytes], each read once.  The disk is told of all of them first,
        and the page cache keeps recent ones; `UserError` P532, P546."""
        path, size = self.files[tensor.file], tensor.row_bytes
        wanted, order = np.unique(np.fromiter(rows, np.int64), return_inverse=True)
        read, place = np.empty((len(wanted), size), np.uint8), tensor.offset
        try:
            if tensor.file not in self._descriptors:
                self._descriptors[tensor.file] = open_regular(path)
            descriptor = self._descriptors[tensor.file]
            places = [tensor.offset + row * size for row in wanted.tolist()]
            for place in places if len(places) > 1 and hasattr(os, "posix_fadvise") else ():
                os.posix_fadvise(descriptor, place, size, os.POSIX_FADV_WILLNEED)
            for number, place in enumerate(places):
                if read_at(descriptor, read[number].data, place, size) < size:
                    raise refuse_cut(path)
        except OSError as error:
            raise refuse_weights(path, place, error) from None
        return read[order]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.maps.clear()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
