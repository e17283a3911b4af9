"""Quantised tensors as libraries write them, by code that shares nothing with the product's."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32

Array = npt.NDArray[Any]
Stored = dict[str, tuple[str, Array]]
"""Types, as a file states them, and elements or their bytes, by name."""

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def write_tensors(file: Path, tensors: Mapping[str, tuple[str, Array]]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def draw(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_codes(most: int, *shape: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, most, shape)


def decode_e4m3(code: int) -> float:
    """A sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign = -1.0 if code & 128 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def draw_e4m3(*shape: int) -> tuple[Array, F32]:
    """Codes but for those that are no numbers, and what they stand for."""
    codes = draw_codes(127, *shape) + 128 * draw_codes(2, *shape, seed=1)
    numbers = np.vectorize(decode_e4m3, otypes=[float])(codes).astype(np.float32)
    return codes.astype(np.uint8), numbers


def decode_fp4(code: int) -> float:
    return -FP4[code & 7] if code & 8 else FP4[code & 7]


def pack_pairs(codes: Array) -> Array:
    """Two 4-bit codes a byte, the first in the low half."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def pack_words(codes: Array, bits: int) -> npt.NDArray[np.int32]:
    """Codes [n, m] as 32-bit words along the rows, the first in the lowest bits, without gaps."""
    count = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << place * bits for place, code in enumerate(row)) for row in codes]
    packed = [row.to_bytes(4 * count, "little") for row in rows]
    return np.frombuffer(b"".join(packed), "<i4").reshape(len(codes), count)
