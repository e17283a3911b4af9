"""Blocks of weights under construction: bytes, integer scales, and floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine, as_bytes, join, pick
from pi2.backends.blocks.room import CHUNK
from pi2.backends.compiler import vectors as v

if TYPE_CHECKING:
    from pi2.backends.blocks.unpacking.columns import Columns, Turned


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A register of weights."""

    weights: v.Expr
    """uint8, or int8 where the block is signed."""
    chunks: tuple[int, ...]
    """The 16 elements of the block that each 16 bytes are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Weights of a block: (``weights`` - ``offset``) x scale x ``scale`` - min x ``min_scale``."""

    parts: Sequence[Part]
    scale: v.Expr
    """float32."""
    scales: v.Expr | None = None
    """int16 of 8 or 16 pieces of the block; None: all are 1."""
    scale_count: int = 8
    is_signed: bool = False
    offset: int = 0
    mins: v.Expr | None = None
    """int16, as many as scales."""
    min_scale: v.Expr | None = None
    """float32; without ``mins`` it is of the whole block, and is added."""
    part_scales: Sequence[v.Expr] | None = None
    """float32 of each 16 elements of a group, instead of ``scale``."""

    def open_numbers(self) -> Callable[[int], v.Expr]:
        """Return what gives the numbers float32 x 16 of a chunk of the block."""
        count = self.scale_count

        def multiply(scale: v.Expr, factors: v.Expr | None) -> Callable[[int], v.Expr]:
            if factors is None:
                whole = v.let(v.splat(scale, CHUNK))
                return lambda chunk: whole
            products = v.let(v.cast(factors, "float32", count) * v.splat(scale, count))
            return lambda chunk: pick(products, count, [chunk * count // 16] * CHUNK)

        scales = multiply(self.scale, self.scales)
        least = None if self.min_scale is None else multiply(self.min_scale, self.mins)

        def read(chunk: int) -> v.Expr:
            part = next(own for own in self.parts if chunk in own.chunks)
            first, size = CHUNK * part.chunks.index(chunk), CHUNK * len(part.chunks)
            values = v.cast(pick(part.weights, size, range(first, first + CHUNK)), "float32", CHUNK)
            if self.offset:
                values = values - v.constant(float(self.offset), "float32", CHUNK)
            if self.part_scales is not None:
                return values * v.splat(self.part_scales[chunk], CHUNK)
            values = values * scales(chunk)
            if least is None:
                return values
            return values + least(chunk) if self.mins is None else values - least(chunk)

        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Weights of several groups of 32, in whole registers, see `Block`."""

    parts: Sequence[v.Expr]
    owners: Sequence[tuple[int, ...]]
    """The group that each piece of a part is of."""
    scales: v.Expr
    """float32 of each group."""
    is_signed: bool = False
    offset: int = 0
    mins: v.Expr | None = None
    """float32 of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How groups of 32 of several rows are unpacked at once: their bytes may be turned before."""

    places: tuple[int, ...] = (2,)
    """First bytes of 16 each."""
    split: Callable[[Machine, v.Expr, int], Sequence[v.Expr]]
    """Returns the registers of weights that a register of such bytes has."""
    scales: Callable[[Sequence[Source]], v.Expr]
    """Returns float32 of each group."""
    fifths: int | None = None
    """First of 4 bytes with a fifth bit of each weight."""
    is_signed: bool = False
    offset: int = 0
    mins: int | None = None
    """First byte of minima."""
    pieces: int = 1
    """Scales of a group."""

    def open(self, source: Source) -> Block:
        """Unpack a group."""
        loads = [source.load(place, 16) for place in self.places]
        parts = [part for raw in loads for part in self.split(source.machine, raw, 16)]
        whole = v.let(join(parts, 16))
        if self.fifths is not None:
            places = [k // 8 for k in range(32)]
            whole = add_fifths(whole, self.join_fifths([source]), 4, places, range(8))
        return Block(
            parts=split_group(source, whole),
            scale=self.scales([source]),
            is_signed=self.is_signed,
            offset=self.offset,
            min_scale=None if self.mins is None else source.load_half(self.mins),
        )

    def bundle(self, sources: Sequence[Source]) -> Bundle:
        """Unpack nibbles of groups, a register of 16 bytes of each after the other."""
        width, parts, owners = sources[0].width, list[v.Expr](), list[tuple[int, ...]]()
        for first in range(0, len(sources), width // 16):
            owner = tuple(range(first, first + width // 16))
            own = [sources[number] for number in owner]
            raw = join_pieces(own, self.places[0], 16)
            both = list(self.split(own[0].machine, raw, width))
            if self.fifths is not None:
                bits = self.join_fifths(own)
                for half in range(2):
                    places = [4 * (k // 16) + 2 * half + k % 16 // 8 for k in range(width)]
                    both[half] = add_fifths(both[half], bits, width // 4, places, range(8))
            parts += both
            owners += [owner, owner]
        return Bundle(
            parts=parts,
            owners=owners,
            scales=self.scales(sources),
            is_signed=self.is_signed,
            offset=self.offset,
            mins=None if self.mins is None else join_halves(sources, self.mins),
        )

    @property
    def has_mins(self) -> bool:
        return self.mins is not None

    def unpack(self, columns: Columns, put: Callable[[int, v.Expr], None]) -> list[v.Expr]:
        """See `Turned.unpack`."""
        rows, width = columns.rows, 4 * columns.lanes
        fifths = None if self.fifths is None else self.join_fifths(rows)
        for load, place in enumerate(self.places):
            for word, column in enumerate(columns.load(place)):
                raw = v.let(as_bytes(column, "uint8", width))
                for part, value in enumerate(self.split(rows[0].machine, raw, width)):
                    chunk = load + part
                    if fifths is not None:
                        byte, bits = 2 * chunk + word // 2, range(word % 2 * 4, word % 2 * 4 + 4)
                        places = [4 * (k // 4) + byte for k in range(width)]
                        value = add_fifths(value, fifths, width, places, bits)
                    put(4 * chunk + word, value)
        scales = self.scales(rows)
        return [scales] if self.mins is None else [scales, join_halves(rows, self.mins)]

    def join_fifths(self, sources: Sequence[Source]) -> v.Expr:
        """Return the bytes with fifth bits, 4 of each group."""
        assert self.fifths is not None
        return join_pieces(sources, self.fifths, 4)


def add_fifths(
    value: v.Expr, bits: v.Expr, count: int, places: Sequence[int], order: Sequence[int]
) -> v.Expr:
    """Return weights with 16 more where a bit is set: of ``bits``, uint8 [count], weight k has byte
    ``places[k]``; ``order`` says again and again which bit."""
    size = len(places)
    flags = fill([1 << order[k % len(order)] for k in range(size)])
    tested = pick(bits, count, places) & flags
    zero = v.constant(0, "uint8", size)
    return v.let(value | T.Select(tested != zero, v.constant(16, "uint8", size), zero))


def split_nibbles(machine: Machine, value: v.Expr, size: int) -> Sequence[v.Expr]:
    """Return the low nibbles of bytes, and the high ones."""
    return low(value, size), high(value, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacking:
    """How blocks of a format are unpacked."""

    size: int
    """Bytes of a block."""
    elements: int
    """Elements of a block that has its own activations: 256, or 32; 1 where they are floats."""
    opens: tuple[Callable[[Source], Block], ...] = ()
    """Unpack what bytes have: a block, or several that follow each other."""
    bundle: Callable[[Sequence[Source]], Bundle] | None = None
    """Unpacks several blocks at once, of as many groups of 32 as `count_bundle` says."""
    counts: Callable[[int], int] | None = None
    """Returns these for a register of so many bytes; by default 16 bytes are of one group."""
    groups: Groups | None = None
    """Groups of 32 that can be turned before they are unpacked."""
    turned: Turned | None = None
    """How blocks of several rows are unpacked at once."""
    most: int = 128
    """Largest magnitude of an unpacked weight."""
    floats: Callable[[v.Buffer, v.Expr, int], v.Expr] | None = None
    """Reads so many floats from a byte on, if elements are plain numbers."""

    @classmethod
    def of_groups(cls, size: int, most: int, groups: Groups) -> Unpacking:
        """Groups whose codes are nibbles."""
        own, several = (groups.open,), groups.bundle
        return cls(size=size, elements=32, opens=own, bundle=several, groups=groups, most=most)

    @property
    def whole(self) -> int:
        """Elements that ``size`` bytes have."""
        return self.elements * max(len(self.opens), 1)

    def count_bundle(self, width: int) -> int:
        """Return the groups that are unpacked at once; 1: none are."""
        if self.counts is not None:
            return self.counts(width)
        return 1 if self.bundle is None or width < 32 else width // 16


class Source:
    """Place of a block, and the parts of its bytes."""

    def __init__(
        self, machine: Machine, weights: v.Buffer, base: v.Expr, grid: v.Buffer, size: int = 0
    ) -> None:
        """``size``: of the block, if several sources follow each other."""
        self.machine = machine
        self.size = size
        self.width = machine.width
        self.weights = weights
        self.base = base
        self.grid = grid
        """Tables of the format (`pi2.backends.blocks.room`)."""

    def load(self, place: int, size: int) -> v.Expr:
        return v.let(v.load(self.weights, self.base + place, size))

    def load_as(self, place: int, dtype: str, lanes: int = 1) -> v.Expr:
        return v.let(v.load_as(self.weights, self.base + place, dtype, lanes))

    def load_half(self, place: int) -> v.Expr:
        """Return an fp16 number as float32."""
        return v.let(v.load_halves(self.weights, self.base + place, 1))


def fill(values: Sequence[int], dtype: str = "uint8") -> v.Expr:
    return v.list_constants(values, dtype)


def shift_right(value: v.Expr, places: int | Sequence[int], size: int) -> v.Expr:
    """Shift bytes, in words of 32 bits with neighbours' bits; ``places`` may be of each 16
    bytes."""
    if places == 0:
        return value
    words = v.reinterpret(value, "uint32", size // 4)
    each = [places] * (size // 16) if isinstance(places, int) else list(places)
    by = fill([place for place in each for _ in range(4)], "uint32")
    return as_bytes(words >> by, "uint8", size)


def shift_left(value: v.Expr, places: int | Sequence[int], size: int) -> v.Expr:
    if places == 0:
        return value
    words = v.reinterpret(value, "uint32", size // 4)
    each = [places] * (size // 16) if isinstance(places, int) else list(places)
    by = fill([place for place in each for _ in range(4)], "uint32")
    return as_bytes(words << by, "uint8", size)


def mask(value: v.Expr, bits: int, size: int) -> v.Expr:
    return value & v.constant(bits, "uint8", size)


def find_flags(value: v.Expr, bits: Sequence[int], worth: int, size: int) -> v.Expr:
    """Return ``worth`` for bytes that have a bit, which may differ for each 16 bytes."""
    tested = value & fill([1 << bit for bit in bits for _ in range(16)])
    zero = v.constant(0, "uint8", size)
    return T.Select(tested != zero, v.constant(worth, "uint8", size), zero)


def low(value: v.Expr, size: int) -> v.Expr:
    return v.let(mask(value, 15, size))


def high(value: v.Expr, size: int) -> v.Expr:
    return v.let(mask(shift_right(value, 4, size), 15, size))


def gather_chunks(values: Sequence[v.Expr]) -> v.Expr:
    """Return vectors of 16 bytes one after another."""
    return v.let(join(values, 16))


def repeat_half(value: v.Expr, size: int, width: int) -> v.Expr:
    """Return bytes again and again until they fill a register."""
    return value if size >= width else v.let(pick(value, size, [k % size for k in range(width)]))


def split_group(source: Source, whole: v.Expr) -> list[Part]:
    """Return the 32 bytes of a group in registers."""
    if source.width >= 32:
        return [Part(weights=v.let(whole), chunks=(0, 1))]
    whole = v.let(whole)
    halves = [v.let(pick(whole, 32, range(k, k + 16))) for k in (0, 16)]
    return [Part(weights=half, chunks=(k,)) for k, half in enumerate(halves)]


def join_halves(sources: Sequence[Source], place: int) -> v.Expr:
    """Return an fp16 number of each block as float32."""
    raw, count = join_pieces(sources, place, 2), len(sources)
    return v.let(v.cast(v.reinterpret(raw, "float16", count), "float32", count))


_PIECES = {2: "int16", 4: "int32"}


def join_pieces(sources: Sequence[Source], place: int, size: int) -> v.Expr:
    """Return so many bytes of each block, from ``place`` on."""
    own, count = sources[0], len(sources)
    whole = own.size * count
    if own.width == 64 < whole <= 128 and not (own.size | place) & 1:
        # Two registers have all blocks: words come from both at once.
        later = whole - 64
        both = [v.let(v.reinterpret(own.load(at, 64), "int16", 32)) for at in (0, later)]
        firsts = [(own.size * number + place) // 2 for number in range(count)]
        words = [first + k for first in firsts for k in range(size // 2)]
        found = Shuffle(both, [word if word < 32 else word - later // 2 + 32 for word in words])
        return v.let(v.reinterpret(found, "uint8", size * count))
    if size in _PIECES:
        words = v.let(join([source.load_as(place, _PIECES[size]) for source in sources], 1))
        return v.let(v.reinterpret(words, "uint8", size * count))
    return v.let(join([source.load(place, size) for source in sources], size))


def _read_f32(weights: v.Buffer, byte: v.Expr, lanes: int) -> v.Expr:
    return v.load_as(weights, byte, "float32", lanes)


def _read_f16(weights: v.Buffer, byte: v.Expr, lanes: int) -> v.Expr:
    return v.load_halves(weights, byte, lanes)


def _read_bf16(weights: v.Buffer, byte: v.Expr, lanes: int) -> v.Expr:
    raw = v.cast(v.load_as(weights, byte, "int16", lanes), "int32", lanes)
    return v.reinterpret(raw << v.constant(16, "int32", lanes), "float32", lanes)


UNPACKINGS = {
    "f32": Unpacking(size=4, elements=1, floats=_read_f32),
    "f16": Unpacking(size=2, elements=1, floats=_read_f16),
    "bf16": Unpacking(size=2, elements=1, floats=_read_bf16),
}
