"""Formats whose elements stand for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.formats.format import Format

if TYPE_CHECKING:
    from pi2.arrays import U8, Bits


class _Plain(Format):
    """Floats; a number of them that is not finite is a fault."""

    __slots__ = ()

    def find_faults(self, raw: U8) -> Bits:
        import numpy as np

        found: Bits = ~np.isfinite(self.decode(raw))
        return found


FORMATS = (
    _Plain(name="f32", number=0, block=1, block_bytes=4, activations="float"),
    _Plain(name="f16", number=1, block=1, block_bytes=2, activations="float"),
    _Plain(name="bf16", number=30, block=1, block_bytes=2, activations="float"),
)
