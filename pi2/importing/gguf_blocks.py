"""The types of numbers of GGUF files: how many bytes they take, and what they stand for.

Q8_0 and Q4_0 are groups of 32 with one fp16 scale, as a store's int8 and int4 are: their codes go
into the store as they are.  What is rarer than Q4_0 is decoded by the `gguf` package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F16, F32, I8, U8
from pi2.diagnostics import UserError
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


_TYPES = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("BF16", 30, 1, 2),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
)
BLOCKS = {block.number: block for block in _TYPES}
"""Types of blocks by the number that a file states."""

_OWN = {"Q8_0": "int8", "Q4_0": "int4"}
"""Types that are decoded here, and what they are in a store."""


def check_block(block: BlockType, tensor: str, file: str) -> None:
    """`UserError` P535 if neither pi2 nor the `gguf` package can decode ``tensor``."""
    if block.is_plain or block.name in _OWN:
        return
    from gguf import quants

    if block.number not in {int(kind) for kind in quants._type_traits}:
        raise UserError.of("P535", f"tensor {tensor!r} in {file} has the type {block.name}")


def decode_blocks(raw: U8, block: BlockType) -> F32:
    """Numbers of rows of blocks: uint8 [n, bytes] -> float32 [n, length]."""
    if block.name in _OWN:
        codes, scales = split_blocks(raw, block)
        count, length = codes.shape
        values = codes.reshape(count, length // GROUP, GROUP).astype(np.float32)
        values *= scales.astype(np.float32)[:, :, None]
        return values.reshape(count, length)
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    found: F32 = quants.dequantize(raw, GGMLQuantizationType(block.number))
    return np.ascontiguousarray(found, np.float32)


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
