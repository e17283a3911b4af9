"""Tensors of a folder of MLC-LLM, quantised (q4f16_1, q4f32_1) or not.

Quantised rows are nibbles q, element 8 j + i in bits 4 i of word j, with a scale s for every 32 of
them; a weight is (q - 7) s, computed in the type of the scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pi2.arrays import F16, F32, I8, U8, Raw
from pi2.importing.mlc_shards import STORAGE, Record, Shard
from pi2.importing.packed_tensor import PackedTensor
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.weights.codes import pack_codes
from pi2.plan.weights.layout import GROUP, Precision

PLAIN = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}
"""What safetensors files call the types."""
_ZERO = 7
"""The nibble that stands for 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlcTensor(PackedTensor):
    """A tensor; ``name`` is what MLC-LLM calls it, that of the nibbles if it is quantised."""

    shard: Shard
    scales: Record | None
    scales_skip: int = 0
    """Bytes of scales before those of the first row."""

    def take_rows(self, first: int, count: int) -> MlcTensor:
        """The tensor that ``count`` rows from ``first`` on make."""
        columns = math.prod(self.shape[1:])
        skip = 0 if self.scales is None else first * columns // GROUP * self._scale_bytes()
        weights = first * columns // 2
        if self.scales is None:
            weights = first * columns * np.dtype(self.check_type()).itemsize
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + weights,
            scales_skip=self.scales_skip + skip,
            size_bytes=self.size_bytes * count // max(1, self.shape[0]),
        )

    def check_type(self) -> str:
        return SourceTensor.check_type(self) if self.scales is None else "|u1"

    def _read_stored(self, start: int, stop: int) -> Raw:
        self.shard.check(self.name)
        columns, count = math.prod(self.shape[1:]), stop - start
        if self.scales is None:
            storage = self.check_type()
            skip = start * columns * np.dtype(storage).itemsize
            flat = self.read_flat(self.offset + skip, count * columns, storage)
            return flat.reshape(count, *self.shape[1:])
        self.scales.shard.check(self.scales.name)
        weight_bytes, scale_bytes = columns // 2, columns // GROUP * self._scale_bytes()
        rows = np.empty((count, weight_bytes + scale_bytes), np.uint8)
        words = self.read_flat(self.offset + start * weight_bytes, count * weight_bytes, "|u1")
        rows[:, :weight_bytes] = words.reshape(count, weight_bytes)
        beside = replace(self, file=self.scales.shard.file, name=self.scales.name)
        skip = self.scales.offset + self.scales_skip + start * scale_bytes
        scales = beside.read_flat(skip, count * scale_bytes, "|u1")
        rows[:, weight_bytes:] = scales.reshape(count, scale_bytes)
        return rows

    def _decode(self, raw: U8) -> F32:
        codes, scales = self._split(raw)
        count, length = codes.shape
        values = codes.reshape(count, length // GROUP, GROUP).astype(np.float32)
        values *= scales.astype(np.float32)[:, :, None]
        if scales.dtype == np.float16:
            # A product of two fp16 numbers is exact in fp32: rounded once, as in fp16.
            with np.errstate(over="ignore"):
                values = values.astype(np.float16).astype(np.float32)
        return values.reshape(count, length)

    def take_codes(self, raw: Raw, precision: Precision) -> tuple[U8, F16 | None] | None:
        if self.scales is None or precision != "int4" or raw.dtype != np.uint8:
            return None
        codes, scales = self._split(raw.view(np.uint8))
        if scales.dtype != np.float16 or codes.max() > _ZERO or not np.isfinite(scales).all():
            return None
        return pack_codes(codes, precision), scales.astype(np.float16, copy=False)

    def _scale_bytes(self) -> int:
        assert self.scales is not None
        return np.dtype(STORAGE[self.scales.dtype]).itemsize

    def _split(self, raw: U8) -> tuple[I8, npt.NDArray[np.float16 | np.float32]]:
        """Codes int8 [n, length] and scales [n, length / 32] of rows of bytes."""
        assert self.scales is not None
        weight_bytes = math.prod(self.shape[1:]) // 2
        nibbles = raw[:, :weight_bytes]
        codes = np.empty((len(raw), weight_bytes, 2), np.int8)
        codes[:, :, 0] = nibbles & np.uint8(15)
        codes[:, :, 1] = nibbles >> np.uint8(4)
        codes -= np.int8(_ZERO)
        scales = np.ascontiguousarray(raw[:, weight_bytes:]).view(STORAGE[self.scales.dtype])
        return codes.reshape(len(raw), -1), scales
