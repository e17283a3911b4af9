"""Formats whose elements stand for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.formats.format import MOST_FLOAT16, Format, check_finite
from pi2.formats.packing import Packing, explain_overflow

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, U8, Bits, Scales
else:
    from pi2.formats.format import np


class _Plain(Format):
    """Floats; a number of them that is not finite is a fault."""

    __slots__ = ()

    def encode(self, rows: F32, importance: F32 | None = None) -> U8:
        check_finite(rows, None if self.block_bytes == 4 or self.name == "bf16" else MOST_FLOAT16)
        if self.name != "bf16":
            return np.ascontiguousarray(rows, f"<f{self.block_bytes}").view(np.uint8)
        bits = np.ascontiguousarray(rows).view(np.uint32)
        # To nearest, ties to even: bfloat16 is the upper half.
        bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (bits >> np.uint32(16)).astype("<u2").view(np.uint8)

    def find_faults(self, raw: U8) -> Bits:
        found: Bits = ~np.isfinite(self.decode(raw))
        return found


class _PlainVectors(Packing):
    __slots__ = ()

    def quantize(self, rows: F32, *, spread: bool = False) -> tuple[U8, None]:
        with np.errstate(over="ignore"):
            plain = np.ascontiguousarray(rows, dtype=self.plain_type)
        if not np.isfinite(plain).all():
            raise ValueError(explain_overflow(rows))
        return plain.view(np.uint8), None

    def dequantize(
        self, weights: U8, scales: Scales | None, length: int, *, spread: bool = False
    ) -> F32:
        assert scales is None and self.plain_type is not None
        plain = np.ascontiguousarray(weights).view(self.plain_type)
        return plain.reshape(len(weights), length).astype(np.float32)


FORMATS = (
    _Plain(name="f32", number=0, block=1, block_bytes=4, activations="float", can_encode=True),
    _Plain(name="f16", number=1, block=1, block_bytes=2, activations="float", can_encode=True),
    _Plain(name="bf16", number=30, block=1, block_bytes=2, activations="float", can_encode=True),
)
PACKINGS = (
    _PlainVectors(
        name="fp16",
        bits=16,
        uses=frozenset({"tables", "projections", "neurons"}),
        scaled="nothing",
        meets_values=True,
        plain_type="<f2",
        like="f16",
    ),
    _PlainVectors(
        name="fp32",
        bits=32,
        uses=frozenset({"vectors"}),
        scaled="nothing",
        plain_type="<f4",
        like="f32",
    ),
)
