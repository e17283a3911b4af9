"""Floats of 4 bits with scales of 8 bits: MXFP4 (OCP Microscaling) and NVFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.formats.format import Format

if TYPE_CHECKING:
    from pi2.arrays import U8, Bits


class _ScaledByBytes(Format):
    """Scales are the first bytes of a block; one code of them stands for no number."""

    __slots__ = ()

    def find_faults(self, raw: U8) -> Bits:
        import numpy as np

        count, mask = (1, 0xFF) if self.name == "mxfp4" else (4, 0x7F)
        blocks = np.ascontiguousarray(raw).reshape(*raw.shape[:-1], -1, self.block_bytes)
        found: Bits = ((blocks[..., :count] & mask) == mask).any(axis=-1)
        return found


FORMATS = (
    _ScaledByBytes(name="mxfp4", number=39, block=32, block_bytes=17, activations="q8_0"),
    _ScaledByBytes(name="nvfp4", number=40, block=64, block_bytes=36, activations="q8_0"),
)
