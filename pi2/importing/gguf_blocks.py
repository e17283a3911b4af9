"""The types of numbers of GGUF files: how many bytes they take, and what they stand for.

Q8_0 and Q4_0 are groups of 32 with one fp16 scale, as a store's int8 and int4 are: their codes go
into the store as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F16, F32, I8, U8
from pi2.diagnostics import UserError
from pi2.formats import find_format, list_formats
from pi2.plan.weights.codes import pack_codes
from pi2.plan.weights.layout import GROUP, Precision


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of numbers: ``elements`` of a row take ``bytes`` together."""

    name: str
    number: int
    elements: int
    bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether every element stands for itself."""
        return self.elements == 1


_WHOLE = (("I8", 24, 1), ("I16", 25, 2), ("I32", 26, 4), ("I64", 27, 8), ("F64", 28, 8))
"""Types of single numbers that no weights have."""
BLOCKS = {
    **{
        own.number: BlockType(own.name.upper(), own.number, own.block, own.block_bytes)
        for own in list_formats().values()
    },
    **{number: BlockType(name, number, 1, size) for name, number, size in _WHOLE},
}
"""Types of blocks by the number that a file states."""

_OWN = {"Q8_0": "int8", "Q4_0": "int4"}
"""Types that stores have too, and what they are there."""


def check_block(block: BlockType, tensor: str, file: str) -> None:
    """`UserError` P535 if the installed `gguf` package does not decode ``tensor``."""
    if block.is_plain:
        return
    from gguf import quants

    if block.number not in {int(kind) for kind in quants._type_traits}:
        raise UserError.of("P535", f"tensor {tensor!r} in {file} has the type {block.name}")


def decode_blocks(raw: U8, block: BlockType) -> F32:
    """Numbers of rows of blocks: uint8 [n, bytes] -> float32 [n, length]."""
    return find_format(block.name.lower()).decode(raw)


def take_blocks(raw: U8, block: BlockType, precision: Precision) -> tuple[U8, F16] | None:
    """Rows of blocks as packed weights and scales of a store, if they are just that."""
    if _OWN.get(block.name) != precision:
        return None
    codes, scales = split_blocks(raw, block)
    if precision == "int8" and codes.min() == -128:
        return None  # a store's int8 is symmetric
    if not np.isfinite(scales).all():
        return None
    return pack_codes(codes, precision), scales


def split_blocks(raw: U8, block: BlockType) -> tuple[I8, F16]:
    """Codes int8 [n, length] and scales float16 [n, length / 32] of Q8_0 or Q4_0 rows."""
    count = len(raw)
    blocks = raw.reshape(count, -1, block.bytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    if block.name == "Q8_0":
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
        return codes.reshape(count, -1), scales
    codes = np.empty((count, blocks.shape[1], GROUP), np.int8)
    pairs = blocks[:, :, 2:]
    codes[:, :, : GROUP // 2] = pairs & np.uint8(15)
    codes[:, :, GROUP // 2 :] = pairs >> np.uint8(4)
    codes -= np.int8(8)
    return codes.reshape(count, -1), scales
