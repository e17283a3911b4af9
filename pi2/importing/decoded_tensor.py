"""Tensors that a checkpoint stores as codes, scales and more, decoded as their rows are read."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, I64, U8, Raw
from pi2.diagnostics import UserError
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

    @property
    def is_stored(self) -> bool:
        return False

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
            return turn(self._decode_stored(self.shape[1]))[start:stop]
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

    def _decode_stored(self, stop: int) -> Raw:
        raw = self._read_stored(0, stop)
        return self._decode(raw.view(np.uint8)) if raw.dtype == np.uint8 else raw


_INTEGERS = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E8M0": "u1"}
"""How numpy reads types that are codes."""
_FLOATS = {"F32", "F16", "BF16", "F64"}
MOST_EXPERTS = 4096
"""Most experts of a layer."""


def _list_e4m3() -> F32:
    """Numbers that the 256 codes of float8 E4M3 (without infinities) stand for."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


E4M3 = _list_e4m3()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Numbers that the 16 codes of a 4-bit float stand for (OCP Microscaling Formats, 2023)."""


E8M0 = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan).astype(np.float32)
"""Powers of two by their exponents; 255 is no number."""


def decode_e8m0(codes: Raw) -> F32:
    """Numbers that 8-bit exponents stand for."""
    return E8M0[codes.view(np.uint8)]


def decode_pairs(codes: Raw) -> F32:
    """4-bit floats [n, 2 m] of bytes [n, m], the low half of each first."""
    raw = codes.view(np.uint8)
    pairs = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1)
    return E2M1[pairs.reshape(len(codes), -1)]


def read_array(tensor: SourceTensor, start: int = 0, stop: int | None = None) -> Raw:
    """Rows of codes or numbers as numpy has them; `UserError` P532 for missing bytes, P535."""
    if tensor.dtype in _FLOATS:
        return tensor.read(start, stop)
    storage = _INTEGERS.get(tensor.dtype)
    if storage is None:
        tensor.check_type()
    assert storage is not None
    rows = tensor.shape[0] if tensor.shape else 1
    stop = rows if stop is None else stop
    width = math.prod(tensor.shape[1:])
    item = np.dtype(storage).itemsize
    if rows * width * item != tensor.size_bytes:
        raise UserError.of(
            "P532",
            f"cannot read {tensor.file}: tensor {tensor.name!r} has not the bytes that its shape "
            "needs",
            help="download or export the checkpoint again",
        )
    skip = start * width * item
    flat = tensor.read_flat(tensor.offset + skip, (stop - start) * width, storage)
    return flat.reshape(stop - start, *tensor.shape[1:])


def take_part(
    tensors: Mapping[str, SourceTensor],
    name: str,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[str, ...] = (),
) -> SourceTensor:
    """A tensor of ``shape`` and one of ``dtypes``; `UserError` P533, P534 or P535."""
    tensor = tensors.get(name)
    if tensor is None:
        raise UserError.of(
            "P533",
            f"there is no tensor {name!r}, which others need to be decoded",
            help="download or export the checkpoint again",
        )
    if dtypes and tensor.dtype not in dtypes:
        raise UserError.of(
            "P535",
            f"tensor {name!r} in {tensor.file} has the type {tensor.dtype}, not "
            f"{' or '.join(dtypes)}",
            help="take a checkpoint that was exported as its configuration says",
        )
    if shape is not None and tensor.shape != shape:
        raise refuse_shape(tensor, shape)
    return tensor


def refuse_shape(tensor: SourceTensor, shape: tuple[int, ...]) -> UserError:
    return UserError.of(
        "P534",
        f"tensor {tensor.name!r} in {tensor.file} has the shape {list(tensor.shape)}, the tensors "
        f"that belong to it say {list(shape)}",
        help="download or export the checkpoint again",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTensor(SourceTensor, ABC):
    """A matrix [rows, columns] that `decode` makes of other tensors; ``offset`` is unused."""

    parts: tuple[SourceTensor, ...]
    """All that it is made of, and what else belongs to it."""

    @property
    def is_stored(self) -> bool:
        return False

    @abstractmethod
    def decode(self, start: int, stop: int) -> F32:
        """Rows ``start`` to ``stop`` float32 [n, columns]."""

    def check_type(self) -> str:
        return "<f4"

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        rows = self.shape[0]
        return self.decode(start, rows if stop is None else min(stop, rows))

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)

    def read_turned(self) -> Raw:
        return turn(self.read_raw())


def describe_decoded(name: str, shape: tuple[int, ...], *parts: SourceTensor) -> dict[str, Any]:
    """What every `DecodedTensor` states of itself, made of ``parts``."""
    return {
        "file": parts[0].file if parts else Path(),
        "name": name,
        "dtype": "F32",
        "shape": shape,
        "offset": 0,
        "size_bytes": sum(part.size_bytes for part in parts),
        "parts": parts,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedTensor(DecodedTensor):
    """Rows that a function makes."""

    compute: Callable[[int, int], F32]
    """Gives rows from one on and before another, float32 [n, ...]."""
    keeps: bool

    @property
    def is_stored(self) -> bool:
        return self.keeps

    def decode(self, start: int, stop: int) -> F32:
        return self.compute(start, stop)


def compute_tensor(
    name: str,
    shape: tuple[int, ...],
    compute: Callable[[int, int], F32],
    *parts: SourceTensor,
    dtype: str | None = None,
) -> ComputedTensor:
    """A tensor that a function makes of ``parts``; ``dtype``: the type of numbers that are
    kept as they are."""
    own = describe_decoded(name, shape, *parts) | {"dtype": dtype or "F32"}
    return ComputedTensor(**own, compute=compute, keeps=dtype is not None)


def multiply_columns(matrix: SourceTensor, factors: F32, *parts: SourceTensor) -> ComputedTensor:
    """A matrix whose columns are multiplied by ``factors`` [columns]; ``parts`` belong to it."""
    return compute_tensor(
        matrix.name,
        matrix.shape,
        lambda start, stop: matrix.read(start, stop) * factors,
        *(parts or (matrix,)),
    )


def unfold_norm(inner: SourceTensor, norm: SourceTensor | None, offset: float) -> SourceTensor:
    """PowerInfer's predictor ``inner`` for the FFN's input.

    It reads h; the FFN reads u = h / |h| * w with the norm's weights w. fc2 relu(fc1 h) has the
    sign of fc2 relu(fc1 (u / w)): columns of fc1 are divided by w."""
    if norm is None or len(inner.shape) != 2 or norm.shape != inner.shape[1:]:
        return inner  # said later, with all that is missing or wrong
    weights = norm.read() + np.float32(offset)
    return multiply_columns(
        inner, np.divide(1, weights, out=np.zeros_like(weights), where=weights != 0)
    )
