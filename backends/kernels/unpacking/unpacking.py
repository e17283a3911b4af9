"""What kernels ask of a format: tiles of floats, fields of dot products, bytes of integer tiles.

Fp16 and blocks of GGUF files, which are multiplied with values that are not rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.blocks.machine import Machine
from pi2.backends.blocks.room import count_table_bytes
from pi2.backends.blocks.unpacking import find_unpacking
from pi2.backends.blocks.unpacking.block import Source
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import DotPrimitive, Vector, list_runs
from pi2.formats import find_packing, list_packings
from pi2.formats.packing import GROUP, BlockPacking, Packing

WIDE = 16
"""Elements that are unpacked together."""
_FIELDS = 4
"""Elements of a group in a word: a byte each, which in weights has two."""

Place = v.Expr | int
Tile = list[tuple[v.Expr, v.Expr]]
"""(place in y, weights without their scale as float32 x lanes) of each element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Chunks of a block that one register holds."""

    number: Place
    """Of the first of them."""
    lanes: int
    """Lanes of the block."""
    load: Callable[[Place, int], v.Expr]
    """Returns so many bytes of weights, from a byte of the block on."""

    @property
    def byte(self) -> Place:
        return self.number * (4 * self.lanes)


@dataclass(frozen=True, slots=True)
class Block:
    """The block of ``lanes`` of a vector that begins with group ``first``."""

    vector: Vector
    lanes: int
    first: v.Expr


class Unpacking:
    """How vectors of one format are unpacked."""

    divides_bytes = True
    """Whether the fields of a byte are different elements."""
    unrolls = False
    """Whether chunks of a block are no steps of a loop."""
    begins_with_offset = False
    """Whether sums of whole bytes may begin with what takes the codes' offset out again."""
    stream_places = 0
    """Bits by which the second of two streams is worth more."""
    values: Sequence[int] = ()
    """Values of 16 codes of 4 bits, if a table has them."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.chunks = packing.chunks
        self.tiles = self.chunks
        """Tiles of a block: the weights that are unpacked to floats at once."""
        self.group_bytes = packing.count_weight_bytes(GROUP)

    # Floats.

    def list_tiles(self, hidden: int) -> list[tuple[int, int, int]]:
        """Return (lanes, first group, number of tiles) for each run of equal blocks."""
        return [(lanes, first, count * self.tiles) for lanes, first, count in list_runs(hidden)]

    def count_groups(self, lanes: int) -> int:
        return lanes

    def count_tile_bytes(self, lanes: int) -> int:
        """Return the bytes of weights that a tile of a block of ``lanes`` begins to read."""
        return 4 * lanes * self.chunks // self.tiles

    def find_chunk(self, tile: Place) -> Place:
        return tile

    def list_elements(self, tile: Place) -> list[v.Expr]:
        raise NotImplementedError

    def list_places(self, lanes: int, first: v.Expr, tile: Place) -> list[v.Expr]:
        """Return the positions in y of a tile's elements, in the order of `emit_tile`."""
        return [v.let(first * GROUP + element * lanes) for element in self.list_elements(tile)]

    def emit_tile(self, isa: Isa, block: Block, tile: Place) -> Tile:
        """Unpack a tile of a block; numbers have their scale where it is their own."""
        vector, lanes = block.vector, block.lanes
        byte = block.first * self.group_bytes + self.find_chunk(tile) * (4 * lanes)
        at = vector.weights_base + v.wide(byte)
        word = v.let(v.load_as(vector.weights, at, "int32", lanes))
        places = [block.first * GROUP + element * lanes for element in self.list_elements(tile)]
        return list(zip(places, self.unpack_word(isa, block, word, tile), strict=True))

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        """Return the numbers of `list_elements` in the word int32 x ``lanes`` of a tile."""
        raise NotImplementedError

    def load_scales(self, vector: Vector, group: v.Expr, count: int) -> v.Expr:
        if self.packing.scaled == "vectors":
            return v.splat(v.load_as(vector.scales, vector.scales_base, "float32", 1), count)
        return v.load_halves(vector.scales, vector.scales_base + v.wide(group * 2), count)

    def load_block_scale(self, block: Block) -> v.Expr:
        """Return the scales of a block as float32 x lanes, times the vector's factor: what
        `emit_tile` leaves out."""
        vector, lanes = block.vector, block.lanes
        has_scales = self.packing.has_scales and not vector.spread
        one = v.constant(1.0, "float32", lanes)
        scales = self.load_scales(vector, block.first, lanes) if has_scales else one
        if vector.factor_base is None:
            return scales
        factor = v.splat(v.load_as(vector.weights, vector.factor_base, "float32", 1), lanes)
        return scales * factor if has_scales else factor

    def can_widen(self, isa: Isa, lanes: int) -> bool:
        """Return whether `emit_narrow_block` unpacks blocks of ``lanes``."""
        return isa.lanes == WIDE and lanes < WIDE and bool(self.values)

    def emit_narrow_block(self, block: Block) -> Tile:
        """Unpack a block: (place in y, float32 x 16 weights without scale) of each 16 elements."""
        vector, lanes, first = block.vector, block.lanes, block.first
        byte = vector.weights_base + v.wide(first * self.group_bytes)
        words = _Words(vector.weights, byte, lanes)
        units = None
        if vector.spread:
            units = _Words(vector.scales, vector.scales_base + v.wide(first * GROUP), lanes)
        table = v.let(v.list_constants(list(self.values), "float32"))
        found = []
        for number in range(2 * lanes):
            element = number * WIDE // lanes
            half = element // (GROUP // 2)
            code = words.take_fields(element % (GROUP // 2), 4 * half)
            weights = look_up_floats(table, code)
            if units is not None:
                exponents = units.take_fields(element, 0) << v.constant(23, "int32", WIDE)
                bits = exponents & v.constant(0x7F800000, "int32", WIDE)
                weights = weights * v.reinterpret(bits, "float32", WIDE)
            found.append((v.let(first * GROUP + number * WIDE), v.let(weights)))
        return found

    def load_wide_scale(self, block: Block, value: v.Expr) -> v.Expr:
        """Return what each of 16 elements is multiplied with: the scale of its group, times a
        neuron's ``value``."""
        lanes = block.lanes
        scale = v.let(self.load_block_scale(block) * v.splat(value, lanes))
        return _repeat(scale, lanes, [lane % lanes for lane in range(WIDE)])

    # Dot products of values that are not rounded, and of integers (`kernels.dots`).

    piece = GROUP
    """Elements that are opened together."""
    table_bytes = 0
    """Of what codes are looked up in, which vectors have instead of scales."""

    def open_piece(self, isa: Isa, vector: Vector, number: v.Expr) -> Callable[[int], v.Expr]:
        """Return what gives the numbers float32 x 16 of each 16 elements of piece ``number``."""
        raise NotImplementedError

    def count_folded(self, isa: Isa, lanes: int) -> int:
        """Return how many chunks of a block narrower than a register fill one."""
        return min(max(isa.lanes // lanes, 1), 4, self.chunks)

    def splits(self, dot: DotPrimitive) -> bool:
        """Return whether the halves of a byte are added up in streams of their own."""
        return False

    def take_fields(self, dot: DotPrimitive, chunk: Chunk) -> list[v.Expr]:
        """Return what the primitive takes of a chunk, field by field: each an operand of the codes
        of other elements, or of the same ones in streams."""
        return self.split(dot, v.let(chunk.load(chunk.byte, 4 * dot.width)))

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        raise NotImplementedError

    def has_offset(self, dot: DotPrimitive) -> bool:
        """Return whether what the primitive takes differs from codes by an offset or a step."""
        return True

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        """Return the sum of codes from the sum of fields; ``sums``: -8 times the inputs' sums."""
        raise NotImplementedError

    # Tiles of bytes (`kernels.amx`, `kernels.i8mm`) and rows of tables.

    has_words = True
    """Whether there is `split_words`."""

    def split_words(
        self, arm: bool, words: v.Expr, word: Place, count: int
    ) -> list[tuple[v.Expr, v.Expr]]:
        """Return (chunk of four elements, int8 [count, 4]) for each chunk that is in the packed
        ``words`` int32 [count], number ``word`` of their groups."""
        raise NotImplementedError


def look_up_floats(table: v.Expr, code: v.Expr) -> v.Expr:
    """Return the lanes of ``table`` float32x16 that the low 4 bits of each lane of ``code`` name:
    vpermps looks at no others."""
    name = "llvm.x86.avx512.permvar.sf.512"
    return T.call_llvm_pure_intrin("float32x16", name, table, code)


class _Words:
    """int32 words of a block, chunk by chunk, each of which has one for every group."""

    def __init__(self, buffer: v.Buffer, byte: v.Expr, lanes: int) -> None:
        self._buffer = buffer
        self._byte = byte
        self._lanes = lanes
        self._loaded: dict[int, v.Expr] = {}

    def take_fields(self, element: int, shift: int) -> v.Expr:
        """Return int32 x 16 whose low bits are the bytes of 16 elements, from ``element`` of the
        groups on, without their lowest ``shift`` bits; the bits above have no meaning."""
        lanes = self._lanes
        own = [element + lane // lanes for lane in range(WIDE)]
        first = own[0] // _FIELDS
        count = (own[-1] // _FIELDS - first + 1) * lanes
        if first not in self._loaded:
            place = self._byte + 4 * first * lanes
            self._loaded[first] = v.let(v.load_as(self._buffer, place, "int32", count))
        words = [(at // _FIELDS - first) * lanes + lane % lanes for lane, at in enumerate(own)]
        shifts = v.list_constants([8 * (at % _FIELDS) + shift for at in own], "int32")
        return _repeat(self._loaded[first], count, words) >> shifts


def _repeat(value: v.Expr, lanes: int, places: list[int]) -> v.Expr:
    if lanes == 1:
        return v.splat(value, WIDE)
    # As many lanes have to be given as are taken.
    return v.let(Shuffle([value] * (WIDE // lanes), places))


class _Halves(Unpacking):
    """A block is a group, and a tile, of two registers."""

    has_words = False

    def list_tiles(self, hidden: int) -> list[tuple[int, int, int]]:
        return [(16, 0, hidden // GROUP)]

    def count_groups(self, lanes: int) -> int:
        return 1

    def count_tile_bytes(self, lanes: int) -> int:
        return 2 * GROUP

    def list_places(self, lanes: int, first: v.Expr, tile: Place) -> list[v.Expr]:
        return [v.let(first * GROUP + half * 16) for half in range(2)]

    def emit_tile(self, isa: Isa, block: Block, tile: Place) -> Tile:
        vector, first = block.vector, block.first
        byte = vector.weights_base + v.wide(first * GROUP * 2)
        return [
            (first * GROUP + half * 16, v.load_halves(vector.weights, byte + half * 32, 16))
            for half in range(2)
        ]

    def open_piece(self, isa: Isa, vector: Vector, number: v.Expr) -> Callable[[int], v.Expr]:
        def read(sixteen: int) -> v.Expr:
            at = number * GROUP + sixteen * WIDE
            return v.load_halves(vector.weights, vector.weights_base + v.wide(at * 2), WIDE)

        return read


class _Blocks(Unpacking):
    """A piece is a block."""

    has_words = False

    def __init__(self, packing: BlockPacking) -> None:
        self.packing = packing
        self.piece = packing.length_step
        self.table_bytes = count_table_bytes(packing.name)
        self._blocks = find_unpacking(packing.block)

    def open_piece(self, isa: Isa, vector: Vector, number: v.Expr) -> Callable[[int], v.Expr]:
        machine = Machine(isa)
        machine.width = WIDE
        base = v.let(vector.weights_base + v.wide(number * self._blocks.size))
        source = Source(machine, vector.weights, base, vector.scales)
        return self._blocks.opens[0](source).open_numbers()


_FP16 = _Halves(find_packing("fp16"))
_FP16.tiles = 1
UNPACKINGS: dict[str, Unpacking] = {"fp16": _FP16} | {
    name: _Blocks(own) for name, own in list_packings().items() if isinstance(own, BlockPacking)
}
