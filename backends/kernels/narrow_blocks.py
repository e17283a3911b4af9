"""Blocks of fewer than 16 lanes, unpacked 16 elements at a time.

A vector of 2,880 elements has blocks of 16, 8 and 2 lanes: tile by tile, its last tenth takes a
third of the arithmetic.  Elements that follow each other in lane order are fields of a few words,
though: of all groups the first field, then the next one.  So words are repeated for 16 lanes, and
every lane takes its own field.  Each element gets the same operations as in `unpacking`: the same
bits.
"""

from __future__ import annotations

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Vector
from pi2.backends.kernels.unpacking import load_block_scale
from pi2.plan.weights.layout import GROUP, Precision, weight_bytes
from pi2.plan.weights.mxfp4 import MAGNITUDES

WIDE = 16
"""Elements that are unpacked together."""
_FIELDS = 4
"""Elements of a group in a word: a byte each, which in weights has two."""


def can_widen(isa: Isa, precision: Precision, lanes: int) -> bool:
    """Return whether `emit_narrow_block` unpacks blocks of ``lanes``."""
    return isa.lanes == WIDE and lanes < WIDE and precision in ("int4", "mxfp4")


def emit_narrow_block(vector: Vector, lanes: int, first: v.Expr) -> list[tuple[v.Expr, v.Expr]]:
    """Unpack the block of ``lanes`` that begins with group ``first``: (place in y, weights without
    their scale as float32 x 16) of each 16 elements."""
    byte = vector.weights_base + v.wide(first * weight_bytes(GROUP, vector.precision))
    words = _Words(vector.weights, byte, lanes)
    units = None
    if vector.spread:
        units = _Words(vector.scales, vector.scales_base + v.wide(first * GROUP), lanes)
    table = v.let(v.list_constants(_list_values(vector.precision), "float32"))
    found = []
    for number in range(2 * lanes):
        element = number * WIDE // lanes
        half = element // (GROUP // 2)
        code = words.take_fields(element % (GROUP // 2), 4 * half)
        weights = T.call_llvm_pure_intrin(
            "float32x16", "llvm.x86.avx512.permvar.sf.512", table, code
        )
        if units is not None:
            exponents = units.take_fields(element, 0) << v.constant(23, "int32", WIDE)
            bits = exponents & v.constant(0x7F800000, "int32", WIDE)
            weights = weights * v.reinterpret(bits, "float32", WIDE)
        found.append((v.let(first * GROUP + number * WIDE), v.let(weights)))
    return found


def load_wide_scale(vector: Vector, value: v.Expr, lanes: int, first: v.Expr) -> v.Expr:
    """Return what each of 16 elements is multiplied with: the scale of its group, times a neuron's
    ``value``."""
    scale = v.let(load_block_scale(vector, lanes, first) * v.splat(value, lanes))
    return _repeat(scale, lanes, [lane % lanes for lane in range(WIDE)])


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
    """Return the lanes ``places`` [16] of a vector of ``lanes``."""
    if lanes == 1:
        return v.splat(value, WIDE)
    # As many lanes have to be given as are taken.
    return v.let(Shuffle([value] * (WIDE // lanes), places))


def _list_values(precision: Precision) -> list[int]:
    """What the 16 codes of 4 bits stand for."""
    if precision == "mxfp4":
        return [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    return list(range(-8, 8))
