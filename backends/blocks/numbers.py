"""Rows of weights as float32: kernels of a format that look them up or add them."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.blocks.elements import walk
from pi2.backends.blocks.machine import Machine, Table
from pi2.backends.blocks.unpacking import Unpacking
from pi2.backends.blocks.unpacking.block import Source
from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa


class _Numbers:
    """Weights, row by row."""

    def __init__(self, isa: Isa, unpacking: Unpacking, table: Table) -> None:
        self._machine, self._unpacking = Machine(isa), unpacking
        self.table = table
        self.length = v.let(self.table.blocks * unpacking.whole)

    def walk(self, row: v.Expr, emit: Callable[[v.Expr, v.Expr, int], None]) -> None:
        """Call ``emit`` with places of a row, numbers from there on, and how many."""
        own, weights = self._unpacking, self.table.weights
        start = v.let(row * self.table.blocks * own.size)
        if own.floats is not None:
            read = own.floats

            def take(place: v.Expr, lanes: int) -> None:
                emit(place, v.let(read(weights, start + place * own.size, lanes)), lanes)

            walk(T.int64(0), self.table.blocks, take)
            return
        with T.serial(self.table.blocks) as number:
            source = Source(
                self._machine, weights, v.let(start + number * own.size), self.table.grid
            )
            for piece, open_block in enumerate(own.opens):
                block = open_block(source)
                numbers = block.open_numbers()
                for chunk in (each for part in block.parts for each in part.chunks):
                    place = number * own.whole + (piece * own.elements + 16 * chunk)
                    emit(v.let(place), v.let(numbers(chunk)), 16)


def emit_take_rows(isa: Isa, unpacking: Unpacking, table: Table) -> None:
    """``y[t]`` = row ``numbers[t]`` of the weights x factor, as float32, added to y if
    ``added``."""
    own = _Numbers(isa, unpacking, table)
    with T.serial(table.first, table.end) as token:
        target = v.let(token * table.y_stride)

        def put(place: v.Expr, value: v.Expr, lanes: int) -> None:
            cell = v.Cell(value * v.splat(table.factor, lanes))
            with T.If(table.added != T.int64(0)), T.Then():
                cell.set(cell.get() + v.load(table.y, target + place, lanes))
            v.store(table.y, target + place, cell.get(), lanes)

        own.walk(v.let(v.wide(table.numbers[token])), put)


def emit_multiply_turned(isa: Isa, unpacking: Unpacking, table: Table) -> None:
    """``y[t, h]`` = the sum of a head's first ``rows`` rows, times elements of ``x[t, h]`` and a
    factor.  Heads are ``each`` rows apart; items are heads."""
    own = _Numbers(isa, unpacking, table)
    with T.serial(table.first, table.end) as head:
        source, target = v.let(head * table.x_each), v.let(head * table.y_each)

        def clear(place: v.Expr, lanes: int) -> None:
            with T.serial(table.tokens) as token:
                at = target + token * table.y_stride + place
                v.store(table.y, at, v.constant(0.0, "float32", lanes), lanes)

        walk(T.int64(0), own.length, clear)
        with T.serial(table.rows) as row:
            element = v.let(source + row)

            def add(place: v.Expr, value: v.Expr, lanes: int) -> None:
                with T.serial(table.tokens) as token:
                    weight = v.let(table.x[token * table.x_stride + element] * table.factor)
                    at = v.let(target + token * table.y_stride + place)
                    total = T.fma(value, v.splat(weight, lanes), v.load(table.y, at, lanes))
                    v.store(table.y, at, total, lanes)

            own.walk(v.let(head * table.each + row), add)
