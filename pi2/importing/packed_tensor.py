"""Tensors that a checkpoint stores otherwise than the model's original code names and lays them.

Such a tensor looks like that of a Hugging Face checkpoint: rows in that order, one matrix per
projection and per expert, numbers as that code would read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I64, U8, Raw
from pi2.importing.safetensors_file import SourceTensor, turn

_PIECE_WEIGHTS = 2**20
"""Weights that are decoded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor(SourceTensor, ABC):
    """A tensor whose stored rows `_read_stored` reads and `_decode` turns into numbers."""

    order: I64 | None = None
    """The stored row at every row of the tensor; None means that both are in the same order."""
    is_turned: bool = False
    """Whether the file has columns where the tensor has rows."""
    added: float = 0.0
    """Number that the file has added to every element."""
    factors: F32 | None = None
    """Factors of the columns, float32 [columns], or [1] where all have the same."""

    @abstractmethod
    def _read_stored(self, start: int, stop: int) -> Raw:
        """Stored rows: plain numbers [n, ...], or bytes uint8 [n, bytes] that must be decoded."""

    @abstractmethod
    def _decode(self, raw: U8) -> F32:
        """The numbers float32 [n, length] that bytes [n, bytes] stand for."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop``: plain numbers, or bytes [n, bytes]; raises as
        `SourceTensor.read_raw`."""
        stop = self.shape[0] if stop is None else stop
        if self.is_turned:
            return turn(self._decode_stored(0, self.shape[1]))[start:stop]
        if self.order is None:
            return self._read_stored(start, stop)
        wanted = self.order[start:stop]
        first, last = int(wanted.min()), int(wanted.max())
        return self._read_stored(first, last + 1)[wanted - first]

    def read_turned(self) -> Raw:
        if self.is_turned:
            return self._read_stored(0, self.shape[1])
        rows, columns = self.shape
        step = max(1, _PIECE_WEIGHTS // columns)
        pieces = ((at, min(at + step, rows)) for at in range(0, rows, step))
        turned: Raw | None = None
        for first, last in pieces:
            piece = self.read_raw(first, last)
            # Groups lie along the rows: bytes must become numbers before they can be turned.
            numbers = self._decode(piece.view(np.uint8)) if piece.dtype == np.uint8 else piece
            if turned is None:
                turned = np.empty((columns, rows), numbers.dtype)
            turned[:, first:last] = turn(numbers)
        assert turned is not None
        return turned

    def widen(self, raw: Raw) -> F32:
        # A zero-argument super() does not work in classes with slots.
        numbers = (
            self._decode(raw.view(np.uint8))
            if raw.dtype == np.uint8
            else SourceTensor.widen(self, raw)
        )
        if self.added:
            numbers = numbers - np.float32(self.added)
        if self.factors is not None:
            numbers = numbers * self.factors
        return numbers

    def _decode_stored(self, start: int, stop: int) -> Raw:
        raw = self._read_stored(start, stop)
        return self._decode(raw.view(np.uint8)) if raw.dtype == np.uint8 else raw
