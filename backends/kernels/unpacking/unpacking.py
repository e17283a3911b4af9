"""How kernels unpack formats, to tiles of floats and to fields of dot products: integers of 2, 4
and 8 bits; fp16 and blocks of GGUF files, which are multiplied with values that are not rounded."""

from __future__ import annotations

from collections.abc import Callable
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

    # Tiles of bytes (`kernels.amx`).

    has_words = True
    """Whether there is `split_words`."""

    def split_words(self, words: v.Expr, word: Place, count: int) -> list[tuple[v.Expr, v.Expr]]:
        """Return (chunk of four elements, int8 [count, 4]) for each chunk that is in the packed
        ``words`` int32 [count], number ``word`` of their groups."""
        raise NotImplementedError


def look_up_floats(table: v.Expr, code: v.Expr) -> v.Expr:
    """Return the lanes of ``table`` float32x16 that the low 4 bits of each lane of ``code`` name:
    vpermps looks at no others."""
    name = "llvm.x86.avx512.permvar.sf.512"
    return T.call_llvm_pure_intrin("float32x16", name, table, code)


class Bytes(Unpacking):
    """A field is a code; if the primitive takes no whole bytes, two nibbles of one."""

    divides_bytes = False
    stream_places = 4

    def list_elements(self, tile: Place) -> list[v.Expr]:
        return [4 * tile + index for index in range(4)]

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        lanes = block.lanes
        result = []
        for index in range(4):
            shifted = word << v.constant(24 - 8 * index, "int32", lanes) if index < 3 else word
            code = shifted >> v.constant(24, "int32", lanes)
            result.append(v.cast(code, "float32", lanes))
        return result

    def splits(self, dot: DotPrimitive) -> bool:
        return not dot.whole_bytes

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        if dot.signed:
            return [v.let(v.reinterpret(raw, "int8", 4 * dot.width))]
        unsigned = v.let(raw ^ v.constant(0x80, "uint8", 4 * dot.width))
        if self.splits(dot):
            return [v.let(dot.take_low(unsigned)), v.let(dot.take_high(unsigned))]
        return [unsigned]

    def has_offset(self, dot: DotPrimitive) -> bool:
        return not dot.signed

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        return total + (sums << v.constant(4, "int32", width))

    def split_words(self, words: v.Expr, word: Place, count: int) -> list[tuple[v.Expr, v.Expr]]:
        return [(word, v.reinterpret(words, "int8", 4 * count))]


class Nibbles(Unpacking):
    """Codes are fields less 8."""

    begins_with_offset = True

    def list_elements(self, tile: Place) -> list[v.Expr]:
        return [4 * tile + index // 2 + 16 * (index % 2) for index in range(8)]

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        lanes = block.lanes
        table = isa.lanes == 16 and lanes == 16
        if table:
            values = v.let(v.cast(T.ramp(-8, 1, 16), "float32", 16))
        else:
            # q + 8 with its top bit flipped is q in two's complement.
            word = v.let(word ^ v.constant(-2004318072, "int32", lanes))
        result = []
        for index in range(8):
            if table:
                code = word >> v.constant(4 * index, "int32", lanes) if index else word
                result.append(look_up_floats(values, code))
                continue
            shifted = word << v.constant(28 - 4 * index, "int32", lanes) if index < 7 else word
            code = shifted >> v.constant(28, "int32", lanes)
            result.append(v.cast(code, "float32", lanes))
        return result

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        return [v.let(dot.take_low(raw)), v.let(dot.take_high(raw))]

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        return total + sums

    def split_words(self, words: v.Expr, word: Place, count: int) -> list[tuple[v.Expr, v.Expr]]:
        size = 4 * count
        codes = v.let(v.reinterpret(words, "uint8", size))
        low = codes & v.constant(15, "uint8", size)
        high = codes >> v.constant(4, "uint8", size)
        return [
            (chunk, self.find_numbers(code, size))
            for chunk, code in ((word, low), (word + 4, high))
        ]

    def find_numbers(self, codes: v.Expr, size: int) -> v.Expr:
        """Return what nibbles uint8 [size] stand for, as int8."""
        return v.reinterpret(codes, "int8", size) - v.constant(8, "int8", size)


class Pairs(Unpacking):
    """Fields of two bits, less 1; a tile is half of a chunk."""

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing)
        self.tiles = self.chunks * 2

    def find_chunk(self, tile: Place) -> Place:
        return tile // 2

    def list_elements(self, tile: Place) -> list[v.Expr]:
        # Field by field, so that the elements of a field lie side by side.
        first = 4 * self.find_chunk(tile) + 16 * (tile % 2)
        return [first + index % 4 + 8 * (index // 4) for index in range(8)]

    def unpack_word(self, isa: Isa, block: Block, word: v.Expr, tile: Place) -> list[v.Expr]:
        lanes = block.lanes
        one, three = (v.constant(number, "int32", lanes) for number in (1, 3))
        table = isa.lanes == 16 and lanes == 16
        if table:
            # Of the low 4 bits of each lane, two are the next code's.
            values = v.let(v.cast((T.ramp(0, 1, 16) & three) - one, "float32", 16))
        half = tile % 2
        turn = T.int32(4 * half) if isinstance(half, int) else T.cast(half * 4, "int32")
        word = v.let(word >> v.splat(turn, lanes))
        result = []
        for index in range(8):
            shift = 8 * (index % 4) + 2 * (index // 4)
            code = word >> v.constant(shift, "int32", lanes) if shift else word
            if table:
                result.append(look_up_floats(values, code))
            else:
                result.append(v.cast((code & three) - one, "float32", lanes))
        return result

    def count_folded(self, isa: Isa, lanes: int) -> int:
        # Both chunks of one lane fill half of a register, and two fields of them a whole one.
        return 4 if lanes == 1 else super().count_folded(isa, lanes)

    def take_fields(self, dot: DotPrimitive, chunk: Chunk) -> list[v.Expr]:
        whole = self.chunks * chunk.lanes
        if dot.width <= whole:
            return super().take_fields(dot, chunk)
        raw = v.let(chunk.load(chunk.byte, 4 * whole))
        half = DotPrimitive(dot.isa, whole)
        fields = [v.let(half.take_pair(raw, number)) for number in range(4)]
        return [v.let(Shuffle(fields[first : first + 2], list(range(16)))) for first in (0, 2)]

    def split(self, dot: DotPrimitive, raw: v.Expr) -> list[v.Expr]:
        return [v.let(dot.take_pair(raw, number)) for number in range(4)]

    def finish(self, total: v.Expr, sums: v.Expr, width: int) -> v.Expr:
        return total + (sums >> v.constant(3, "int32", width))

    def split_words(self, words: v.Expr, word: Place, count: int) -> list[tuple[v.Expr, v.Expr]]:
        size, found = 4 * count, []
        codes = v.let(v.reinterpret(words, "uint8", size))
        three, one = v.constant(3, "uint8", size), v.constant(1, "int8", size)
        for field in range(4):
            code = (codes >> v.constant(2 * field, "uint8", size)) & three
            found.append((word + 2 * field, v.reinterpret(code, "int8", size) - one))
        return found


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
UNPACKINGS: dict[str, Unpacking] = {
    "fp16": _FP16,
    "int4": Nibbles(find_packing("int4")),
    "int8": Bytes(find_packing("int8")),
    "ternary": Pairs(find_packing("ternary")),
} | {name: _Blocks(own) for name, own in list_packings().items() if isinstance(own, BlockPacking)}
