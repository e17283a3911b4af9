"""Formats of packed vectors in stores: layout of codes in bytes, and their meaning.

A *packed vector* holds ``length`` weights, a multiple of 32 (other widths are padded with zeros),
in groups of 32. Groups are taken together in *blocks* of 16 lanes, then a tail of 8, 4, 2, 1 lanes
(the binary digits of the rest): no lane is empty. Within a block of L lanes, lane ``j`` belongs to
group ``j``.

A code of ``bits`` bits is kept as an unsigned *field*, ``(code + offset) / step``. A field is cut
into planes of 8, 4, 2 and 1 bits, the largest first (3 bits: 2, then 1), from its lowest bit on. A
plane of p bits has p chunks of 4 L bytes: byte ``b`` of lane ``j`` in chunk ``c`` holds element
``4c + b + 4pk`` of group ``j`` in its bits ``pk`` to ``pk + p - 1``.

So one vector instruction multiplies 4 elements of 16 groups, and the integer sum of a whole group
ends up in its lane. The multiplication with 16 consecutive scales needs no shuffle. Plain numbers
(fp16) are in their own order. Scales follow in the order of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pi2.formats.format import Format, check_finite

if TYPE_CHECKING:
    import numpy as np

    from pi2.arrays import F32, I8, U8, U32, Scales
else:
    from pi2.formats.format import np

GROUP = 32
"""Weights that share a scale."""
ALIGNMENT = 64
"""Alignment in bytes: every allocation begins at a multiple of it."""
Use = Literal["tables", "projections", "neurons", "gates", "vectors"]
"""Tensors of a store: tables are embeddings, heads and predictors; gates are gate and up rows of
neurons as GGUF files have them; vectors are norms and biases."""
_CHUNK_WEIGHTS = 2**18
"""Weights quantised together: their temporaries stay within a core's cache."""


def split_lanes(length: int) -> list[int]:
    """Return the lanes of each block of a packed vector, ``[16, 16, ..., 8, 4, 2, 1]``."""
    assert length > 0 and length % GROUP == 0, length
    groups = length // GROUP
    lanes = [16] * (groups // 16)
    rest = groups % 16
    lanes += [size for size in (8, 4, 2, 1) if rest & size]
    return lanes


def fill_groups(width: int) -> int:
    """Length of the packed vector that holds ``width`` elements: zeros fill its last group."""
    return round_up(width, GROUP)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def align_bytes(size: int) -> int:
    """Round up to a cache line, at which every tensor begins."""
    return round_up(size, ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A format of packed vectors.  One of integers with an fp16 scale for each group needs
    `find_codes` only."""

    name: str
    bits: int
    """Of a weight."""
    uses: Collection[Use] = ()
    """Tensors that a model document may keep so."""
    offset: int = 0
    scale_type: str = "<f2"
    """NumPy's name of the type of scales."""
    scaled: Literal["groups", "vectors", "nothing"] = "groups"
    """Parts of a matrix with a scale each."""
    plain_type: str | None = None
    """NumPy's name of the type of plain numbers; None: codes."""
    top: int = 0
    """Largest code; 0 where codes are not integers that scales multiply."""
    like: str | None = None
    """The GGUF format (`pi2.formats.find_format`) with the same numbers."""
    is_published: bool = False
    """Whether checkpoints come in it: it is kept as it is unless another one is asked for."""
    is_searched: bool = False
    """Whether scales that are searched for err less than the largest weight's."""
    meets_values: bool = False
    """Whether kernels multiply it with activations that are not rounded."""
    length_step: int = GROUP
    """What the length of a vector is a multiple of."""
    shares_down_scales: bool = False
    """Whether 32 neurons share the scale of each element of their down columns: these are
    ``spread``, a scale for every element."""

    @property
    def is_plain(self) -> bool:
        """Whether every number stands for itself, in its own place."""
        return self.plain_type is not None

    @property
    def has_group_codes(self) -> bool:
        """Whether its numbers are integers, times the scale of their group."""
        return self.top > 0 and self.scaled == "groups"

    @property
    def is_float32(self) -> bool:
        return self.plain_type == "<f4"

    @property
    def has_scales(self) -> bool:
        return self.scaled != "nothing"

    @property
    def joined(self) -> str:
        """The format of blocks of such vectors (`join_blocks`)."""
        return self.like or self.name

    @property
    def chunks(self) -> int:
        """Chunks of a block's first plane."""
        return next(self.list_planes())

    def list_planes(self) -> Iterator[int]:
        return (size for size in (16, 8, 4, 2, 1) if self.bits & size)

    def count_weight_bytes(self, length: int) -> int:
        """Return the bytes of a vector's weights, scales not included."""
        return length * self.bits // 8

    def count_scales(self, length: int) -> int:
        return {"groups": length // GROUP, "vectors": 1, "nothing": 0}[self.scaled]

    def count_scale_bytes(self, length: int) -> int:
        return self.count_scales(length) * int(self.scale_type[-1])

    def view_scales(self, raw: U8, rows: int) -> Scales:
        """Return the scales of ``rows`` vectors whose bytes are ``raw``, one after the other or
        [rows, .]: [rows, .]."""
        scales: Scales = raw.view(self.scale_type)
        # Of no rows, only what is in rows tells how long they are.
        return scales if scales.ndim == 2 else scales.reshape(rows, -1)

    def find_codes(self, rows: F32, scales_out: Scales) -> I8:
        """Return codes int8 [n, length] of ``rows``, and fill ``scales_out`` [n, scales].  Raises
        `ValueError` for weights that cannot be stored."""
        raise NotImplementedError

    def take_numbers(self, codes: I8) -> F32:
        """Return what codes stand for, in units of their scales; a new array."""
        return codes.astype(np.float32)

    def take_scales(self, scales: Scales) -> F32:
        return scales.astype(np.float32)

    def quantize(self, rows: F32, *, spread: bool = False) -> tuple[U8, Scales | None]:
        """Quantise and pack ``rows`` float32 [n, length]: weights uint8 [n, weight bytes] and
        scales [n, scales] or None; ValueError if a weight does not fit."""
        count, length = rows.shape
        assert rows.dtype == np.float32 and not spread, (rows.dtype, spread)
        weights = np.empty((count, self.count_weight_bytes(length)), np.uint8)
        scales: Scales = np.empty((count, self.count_scales(length)), self.scale_type)
        step = max(1, _CHUNK_WEIGHTS // length)
        for start in range(0, count, step):
            piece = slice(start, start + step)
            weights[piece] = self.pack(self.find_codes(rows[piece], scales[piece]))
        return weights, scales

    def dequantize(
        self, weights: U8, scales: Scales | None, length: int, *, spread: bool = False
    ) -> F32:
        """Undo `quantize`: float32 [n, length]."""
        assert scales is not None and not spread
        values = self.take_numbers(self.unpack(weights, length))
        count = self.count_scales(length)
        groups = values.reshape(len(values), count, length // count)
        groups *= self.take_scales(scales)[:, :, None]
        return values

    def pack(self, codes: I8) -> U8:
        """Lay codes int8 [n, length] out as bytes uint8 [n, weight bytes]."""
        if self.offset:
            codes = codes + np.int8(self.offset)
        # Four elements are a word.
        count, length = codes.shape
        fields = np.ascontiguousarray(codes).view("<u4").reshape(count, length // GROUP, 8)
        return self.lay_words(self._join(fields))

    def _join(self, fields: U32) -> U32:
        """Words [n, groups, bits] of words of four fields [n, groups, 8]."""
        if self.bits == 8:
            return fields
        joined = np.empty((*fields.shape[:2], self.bits), np.uint32)
        low, word = 0, 0
        for size in self.list_planes():
            mask = np.uint32(0x01010101 * ((1 << size) - 1))
            plane = (fields >> np.uint32(low) if low else fields) & mask
            own = joined[:, :, word : word + size]
            own[:] = plane[:, :, :size]
            for turn in range(1, 8 // size):
                own |= plane[:, :, size * turn : size * (turn + 1)] << np.uint32(size * turn)
            low, word = low + size, word + size
        return joined

    def unpack(self, weights: U8, length: int) -> I8:
        """Undo `pack`: bytes uint8 [n, weight bytes] -> codes int8 [n, length]."""
        words = self.order_words(weights, length)
        codes = np.zeros((*words.shape[:2], 8), np.uint32)
        low, word = 0, 0
        for size in self.list_planes():
            mask, plane = np.uint32(0x01010101 * ((1 << size) - 1)), words[:, :, word : word + size]
            for turn in range(8 // size):
                own = codes[:, :, size * turn : size * (turn + 1)]
                own |= (plane >> np.uint32(size * turn) & mask) << np.uint32(low)
            low, word = low + size, word + size
        found = codes.view(np.int8).reshape(len(weights), length)
        if self.offset:
            found -= np.int8(self.offset)
        return found

    def _list_blocks(self, groups: int) -> Iterator[tuple[slice, int]]:
        """Which groups blocks of the same number of lanes have, and how many lanes."""
        first = 0
        for lanes, blocks in Counter(split_lanes(groups * GROUP)).items():
            yield slice(first, first + blocks * lanes), lanes
            first += blocks * lanes

    def lay_words(self, words: U32) -> U8:
        """Undo `order_words`: words [n, groups, words of a group] as uint8 [n, weight bytes]."""
        count, groups, size = words.shape
        laid = np.empty((count, groups * size), "<u4")
        for own, lanes in self._list_blocks(groups):
            # Word w of all lanes comes before word w + 1.
            width = own.stop - own.start
            block = words[:, own].reshape(count, width // lanes, lanes, size).transpose(0, 1, 3, 2)
            laid[:, own.start * size : own.stop * size] = block.reshape(count, width * size)
        return laid.view(np.uint8)

    def order_words(self, weights: U8, length: int) -> U32:
        """Put the words of packed vectors uint8 [n, weight bytes] in the order of groups: uint32
        [n, groups, words of a group]."""
        count, groups, size = len(weights), length // GROUP, self.bits
        words = np.ascontiguousarray(weights).view("<u4")
        if self.is_plain:
            return np.asarray(words.reshape(count, groups, size), np.uint32)
        ordered = np.empty((count, groups, size), np.uint32)
        for own, lanes in self._list_blocks(groups):
            width, read = own.stop - own.start, words[:, own.start * size : own.stop * size]
            block = read.reshape(count, width // lanes, size, lanes)
            ordered[:, own] = block.transpose(0, 1, 3, 2).reshape(count, width, size)
        return ordered

    def join_blocks(self, weights: U8, scales: Scales | None, length: int) -> U8:
        """Return packed vectors [n, weight bytes] and scales as blocks of the format `joined`,
        uint8 [n, bytes]; not copied where they are blocks.  Scales of whole vectors stay apart."""
        if scales is None:
            return weights
        if self.scaled == "vectors":
            return self.order_words(weights, length).view(np.uint8).reshape(len(weights), -1)
        count, groups = len(weights), length // GROUP
        scale = scales.itemsize
        blocks = np.empty((count, groups, scale + 4 * self.bits), np.uint8)
        own = np.ascontiguousarray(scales).view(np.uint8)
        blocks[:, :, :scale] = own.reshape(count, groups, scale)
        words = self.order_words(weights, length).view(np.uint8)
        blocks[:, :, scale:] = words.reshape(count, groups, -1)
        return blocks.reshape(count, -1)

    def split_blocks(self, blocks: U8, length: int) -> tuple[U8, Scales]:
        """Undo `join_blocks`: weights [n, weight bytes] and scales [n, scales] if blocks have them,
        copied."""
        count, scale = len(blocks), int(self.scale_type[-1])
        scale *= self.scaled == "groups"
        parts = blocks.reshape(count, length // GROUP, -1)
        scales = self.view_scales(np.ascontiguousarray(parts[:, :, :scale]).reshape(-1), count)
        return self.lay_words(np.ascontiguousarray(parts[:, :, scale:]).view("<u4")), scales


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPacking(Packing):
    """Whole blocks of a GGUF file, byte for byte."""

    block: Format

    def count_weight_bytes(self, length: int) -> int:
        # What fills no block is a finding (P253), and sizes are asked for before.
        return self.block.count_bytes(round_up(length, self.length_step))

    def quantize(self, rows: F32, *, spread: bool = False) -> tuple[U8, None]:
        if not rows.any():  # in every format, blocks of zeros stand for zeros
            return np.zeros((len(rows), self.count_weight_bytes(rows.shape[1])), np.uint8), None
        check_finite(rows)
        if not self.block.can_encode:
            raise ValueError(f"numbers of another format cannot become {self.name}")
        return self.block.encode(rows), None

    def dequantize(
        self, weights: U8, scales: Scales | None, length: int, *, spread: bool = False
    ) -> F32:
        assert scales is None and not spread
        return self.block.decode(weights).reshape(len(weights), length)


def keep_blocks(formats: Iterable[Format]) -> tuple[Packing, ...]:
    return tuple(
        BlockPacking(
            name=own.name,
            bits=8 * own.block_bytes // own.block,
            uses=frozenset({"gates"}),
            scaled="nothing",
            like=own.name,
            meets_values=True,
            length_step=own.block,
            block=own,
        )
        for own in formats
        if own.is_kept
    )


def explain_overflow(rows: F32) -> str:
    """Say why weights do not fit into a format whose scales are fp16."""
    if not np.isfinite(rows).all():
        return "a weight is not a finite number"
    return f"a weight of magnitude {float(np.abs(rows).max()):.4g} does not fit into fp16"
