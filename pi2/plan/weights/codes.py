"""Lays codes of weights out as the bytes that `pi2.plan.weights.layout` describes, and back.

numpy code, as `rounding` and `bundles` are, and therefore never imported by the plan language
itself (``pi2 validate`` starts without numpy); the store, the converter, the backends and tests
import it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pi2.arrays import I8, U8, U32
from pi2.plan.weights.layout import GROUP, Precision, split_lanes, weight_bytes

ODD_TOPS = {"int2": 3, "int3": 7}
"""Largest codes of precisions whose codes are odd."""


def pack_codes(codes: I8, precision: Precision) -> U8:
    """Lay int8 [n, length] codes (int4: -8..7; mxfp4: 0..15; int3: -7, -5, ..., 7; int2: -3, -1, 1,
    3; ternary: -1, 0, 1) out as bytes uint8 [n, weight_bytes]."""
    count, length = codes.shape
    packed = np.empty((count, weight_bytes(length, precision)), np.uint8)
    group, byte = 0, 0
    # Blocks of the same number of lanes are laid out together.
    for lanes, blocks in Counter(split_lanes(length)).items():
        elements = blocks * lanes * GROUP
        size = weight_bytes(elements, precision)
        block = np.ascontiguousarray(codes[:, group * GROUP : group * GROUP + elements])
        # Four elements are a word; word w of all lanes comes before word w + 1.
        words = block.view("<u4").reshape(count, blocks, lanes, 8)
        ordered = np.ascontiguousarray(words.transpose(0, 1, 3, 2))
        if precision in ("int4", "mxfp4"):
            ordered = _join_nibbles(ordered[:, :, :4], ordered[:, :, 4:])
            if precision == "int4":
                # With 4 bits, adding 8 is turning the highest over.
                ordered ^= np.uint32(0x88888888)
        elif precision == "int2":
            ordered = _join_pairs(_number_odd(ordered, 3))
        elif precision == "ternary":
            ordered = _join_pairs((ordered.view(np.int8) + np.int8(1)).view(np.uint32))
        elif precision == "int3":
            ordered = _join_triples(_number_odd(ordered, 7))
        packed[:, byte : byte + size] = ordered.reshape(count, -1).view(np.uint8)
        group += blocks * lanes
        byte += size
    return packed


def _join_nibbles(low: U32, high: U32) -> U32:
    """Words of four bytes ``q | q' << 4``, of words of four codes q and q'."""
    joined = high << np.uint32(4)
    joined &= np.uint32(0xF0F0F0F0)
    joined |= low & np.uint32(0x0F0F0F0F)
    return joined


def _number_odd(words: U32, top: int) -> U32:
    """Words of four numbers ``(q + top) / 2``, of words of four odd codes q."""
    return ((words.view(np.int8) + np.int8(top)) >> np.int8(1)).view(np.uint32)


def _join_triples(fields: U32) -> U32:
    """Words [n, blocks, 3, lanes]: the lower two bits of the numbers in the ``fields`` [n, blocks,
    8, lanes], then the highest ones."""
    highest = np.zeros_like(fields[:, :, :1])
    for word in range(8):
        own = (fields[:, :, word : word + 1] >> np.uint32(2)) & np.uint32(0x01010101)
        highest |= own << np.uint32(word)
    return np.concatenate([_join_pairs(fields & np.uint32(0x03030303)), highest], axis=2)


def _join_pairs(fields: U32) -> U32:
    """Words [n, blocks, 2, lanes] of the numbers of two bits in the ``fields`` [n, blocks, 8,
    lanes], four in each."""
    joined = np.zeros_like(fields[:, :, :2])
    for turn in range(4):
        joined |= fields[:, :, 2 * turn : 2 * turn + 2] << np.uint32(2 * turn)
    return joined


def unpack_codes(weights: U8, length: int, precision: Precision) -> I8:
    """Undo `pack_codes`: bytes uint8 [n, weight_bytes] -> codes int8 [n, length]."""
    count = weights.shape[0]
    codes = np.empty((count, length), np.int8)
    group, byte = 0, 0
    for lanes in split_lanes(length):
        elements = lanes * GROUP
        size = weight_bytes(elements, precision)
        source = weights[:, byte : byte + size]
        block = np.empty((count, lanes, GROUP), np.int8)
        if precision in ("int4", "mxfp4"):
            ordered = source.reshape(count, 4, lanes, 4).transpose(0, 2, 1, 3)
            pairs = ordered.reshape(count, lanes, 16)
            block[:, :, :16] = pairs & np.uint8(15)
            block[:, :, 16:] = pairs >> np.uint8(4)
            if precision == "int4":
                block -= np.int8(8)
        elif precision == "ternary" or precision in ODD_TOPS:
            ordered = source[:, : 8 * lanes].reshape(count, 2, lanes, 4).transpose(0, 2, 1, 3)
            fours = ordered.reshape(count, lanes, 8)
            for turn in range(4):
                fields = (fours >> np.uint8(2 * turn)) & np.uint8(3)
                block[:, :, 8 * turn : 8 * turn + 8] = fields
            if precision == "int3":
                highest = source[:, 8 * lanes :].reshape(count, lanes, 4)
                for word in range(8):
                    own = (highest >> np.uint8(word)) & np.uint8(1)
                    block[:, :, 4 * word : 4 * word + 4] += (own << np.uint8(2)).view(np.int8)
            if precision == "ternary":
                block -= np.int8(1)
            else:
                block *= np.int8(2)
                block -= np.int8(ODD_TOPS[precision])
        else:
            ordered = source.reshape(count, 8, lanes, 4).transpose(0, 2, 1, 3)
            block[:] = ordered.reshape(count, lanes, GROUP).view(np.int8)
        codes[:, group * GROUP : group * GROUP + elements] = block.reshape(count, elements)
        group += lanes
        byte += size
    return codes


def order_words(weights: U8, length: int, precision: Precision) -> U32:
    """Put the words of packed vectors uint8 [n, weight_bytes] in the order of groups: uint32 [n,
    groups, words of a group]."""
    count = len(weights)
    words = weight_bytes(GROUP, precision) // 4
    if precision == "fp16":
        plain = np.ascontiguousarray(weights).view("<u4")
        return np.asarray(plain.reshape(count, length // GROUP, words), np.uint32)
    ordered = np.empty((count, length // GROUP, words), np.uint32)
    group, byte = 0, 0
    for lanes, blocks in Counter(split_lanes(length)).items():
        groups = blocks * lanes
        size = weight_bytes(groups * GROUP, precision)
        source = np.ascontiguousarray(weights[:, byte : byte + size]).view("<u4")
        block = source.reshape(count, blocks, words, lanes).transpose(0, 1, 3, 2)
        ordered[:, group : group + groups].reshape(count, blocks, lanes, words)[:] = block
        group += groups
        byte += size
    return ordered
