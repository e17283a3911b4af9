"""Tensors that a checkpoint stores as codes, scales and more, decoded as their rows are read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi2.arrays import F32, Raw
from pi2.diagnostics import UserError
from pi2.importing.safetensors_file import SourceTensor, turn

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
    """Rows ``start`` to ``stop`` of a tensor of codes or of numbers as numpy has them.

    Raises `UserError` P532 if bytes are missing, P535 for a type that is neither.
    """
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
    """A tensor that decoding needs, of ``shape`` and one of ``dtypes`` if they are given.

    Raises `UserError` P533, P534 or P535.
    """
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
    """What to raise for a tensor whose shape does not fit those beside it."""
    return UserError.of(
        "P534",
        f"tensor {tensor.name!r} in {tensor.file} has the shape {list(tensor.shape)}, the tensors "
        f"that belong to it say {list(shape)}",
        help="download or export the checkpoint again",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTensor(SourceTensor, ABC):
    """A matrix [rows, columns] whose numbers `decode` makes of other tensors; ``offset`` means
    nothing here."""

    @abstractmethod
    def decode(self, start: int, stop: int) -> F32:
        """Rows ``start`` to ``stop`` float32 [n, columns]."""

    def check_type(self) -> str:
        return "<f4"

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.decode(start, self.shape[0] if stop is None else stop)

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)

    def read_turned(self) -> Raw:
        return turn(self.read_raw())


def describe_decoded(name: str, shape: tuple[int, ...], *parts: SourceTensor) -> dict[str, Any]:
    """What every `DecodedTensor` states of itself, made of ``parts``."""
    return {
        "file": parts[0].file,
        "name": name,
        "dtype": "F32",
        "shape": shape,
        "offset": 0,
        "size_bytes": sum(part.size_bytes for part in parts),
    }
