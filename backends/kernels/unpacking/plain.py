"""fp16, which kernels multiply with values that are not rounded."""

from __future__ import annotations

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.unpacking.unpacking import Block, Place, Tile, Unpacking
from pi2.formats import find_packing
from pi2.formats.packing import GROUP


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


_FP16 = _Halves(find_packing("fp16"))
_FP16.tiles = 1
UNPACKINGS = {"fp16": _FP16}
