"""fp16 and blocks of GGUF files, which kernels multiply with values that are not rounded."""

from __future__ import annotations

from collections.abc import Callable

from pi2.backends.blocks.machine import Machine
from pi2.backends.blocks.room import count_table_bytes
from pi2.backends.blocks.unpacking import find_unpacking
from pi2.backends.blocks.unpacking.block import Source
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Vector
from pi2.backends.kernels.unpacking.unpacking import WIDE, Block, Place, Tile, Unpacking
from pi2.formats import find_packing, list_packings
from pi2.formats.packing import GROUP, BlockPacking


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
