"""Arguments of an instruction, and the arrays at its addresses."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32, F64, I32, I64
from pi2.backends.blocks.contract import FIELDS, PIECE
from pi2.plan.documents.plan import KvType

Array = npt.NDArray[Any]


class Arguments:
    """Numbers and addresses by name (``own.length``) of items ``first`` to ``end``."""

    def __init__(
        self,
        kernel: str,
        address: int,
        items: tuple[int, int],
        *,
        format: str | None,
        kv: KvType,
        lanes: int,
    ) -> None:
        """``address``: of the table; ``format``: of the weights; ``lanes``: see `Interpreter`."""
        self.kernel, fields = kernel, FIELDS[kernel]
        raw = (ctypes.c_int64 * len(fields)).from_address(address)
        self._values = dict(zip(fields, raw, strict=True))
        self.first, self.last = items
        self.format, self.kv, self.lanes = format, kv, lanes

    def __getattr__(self, name: str) -> int:
        try:
            return int(self._values[name])
        except KeyError:
            raise AttributeError(name) from None

    def real(self, name: str) -> float:
        """Return a float32, which is the low half of its number."""
        number: float = struct.unpack("<f", struct.pack("<I", self._values[name] & 0xFFFFFFFF))[0]
        return number

    def view(
        self,
        name: str,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        *,
        dtype: str = "float32",
        skip: int = 0,
    ) -> Array:
        """Return the array that begins ``skip`` elements behind an address; strides are elements,
        by default without gaps."""
        size = np.dtype(dtype).itemsize
        if not all(shape):
            return np.zeros(shape, dtype)
        steps, span = None, math.prod(shape)
        if strides is not None:
            steps = [step * size for step in strides]
            span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        address = self._values[name] + skip * size
        raw: Any = (ctypes.c_char * (span * size)).from_address(address)
        return np.ndarray(shape, dtype, raw, strides=steps)

    def vector(self, name: str, length: int) -> F32:
        return self.view(name, (length,))

    def numbers(self, name: str, count: int, skip: int = 0) -> I32:
        return self.view(name, (count,), dtype="int32", skip=skip)

    def vectors(self, name: str, length: int, stride: int | None = None) -> F32:
        """Return the vectors of tokens that are the items, ``NAME_stride`` apart."""
        stride = self._values[f"{name}_stride"] if stride is None else stride
        shape = self.last - self.first, length
        return self.view(name, shape, (stride, 1), skip=self.first * stride)

    @property
    def items(self) -> I64:
        return np.arange(self.first, self.last)

    def list_pieces(self) -> Iterator[tuple[slice, slice]]:
        """Return items of `PIECE` elements as rectangles of tokens and elements."""
        length = self.length
        pieces = -(-length // PIECE)
        at = self.first
        while at < self.last:
            token, piece = divmod(at, pieces)
            whole = (self.last - at) // pieces if piece == 0 else 0
            if whole:
                yield slice(token, token + whole), slice(0, length)
                at += whole * pieces
                continue
            end = min(pieces, piece + self.last - at)
            yield slice(token, token + 1), slice(piece * PIECE, min(end * PIECE, length))
            at += end - piece

    def cut(self, name: str, stride: int, piece: tuple[slice, slice]) -> F32:
        """Return a rectangle of tokens and elements."""
        tokens, elements = piece
        shape = tokens.stop - tokens.start, elements.stop - elements.start
        return self.view(name, shape, (stride, 1), skip=tokens.start * stride + elements.start)

    def find_sequences(self, tokens: I64) -> tuple[I32, I32]:
        """Return sequences and positions of tokens."""
        count = int(tokens.max(initial=-1)) + 1
        return self.numbers("sequences", count)[tokens], self.numbers("positions", count)[tokens]


def widen(values: Array) -> F64:
    return np.array(values, np.float64)
