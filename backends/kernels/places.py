"""Lists of gathered neurons, a few of which are computed together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v

TOGETHER = 4
"""Neurons that a thread computes at the same time.  A loop that only reads rows of 7 KB, spread
over memory, got 15 GB/s with one row at a time, 19 with four and 20 with eight, of 22 in long runs
(Skylake, two threads).  Down vectors share the loads and stores of the sum."""


@dataclass(frozen=True, slots=True)
class Place:
    """Slot of a neuron, and its row of scales where these are resident."""

    slot: v.Expr
    row: v.Expr | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceList:
    """A thread's neurons, `TOGETHER` at a time."""

    count: v.Expr
    slots: v.Buffer
    rows: v.Buffer | None
    locate: Callable[[v.Expr], v.Expr]
    """Where the neuron at a place of the list stands in these."""
    ahead: v.Expr | None = None
    """Neurons that stand there from the list's first on, where others follow it."""

    def read(self, place: v.Expr) -> Place:
        """Return the neuron at a place of the list."""
        index = self.locate(place)
        slot = v.let(self.slots[index])
        return Place(slot, None if self.rows is None else v.let(self.rows[index]))

    def count_turns(self) -> v.Expr:
        """Return how often `TOGETHER` neurons are to be taken."""
        return T.floordiv(self.count + (TOGETHER - 1), TOGETHER)

    def list_places(self, first: v.Expr) -> list[v.Expr]:
        """Return the places from ``first`` on; the last one stands for those beyond it."""
        return [T.min(first + index, self.count - 1) for index in range(TOGETHER)]

    def take(self, first: v.Expr) -> list[Place]:
        """Return the neurons from place ``first`` on, likewise."""
        return [self.read(place) for place in self.list_places(first)]

    def look_ahead(self, first: v.Expr) -> list[Place]:
        """Return the neurons from place ``first`` on that memory is asked for, those that follow
        the list among them."""
        last = (self.count if self.ahead is None else self.ahead) - 1
        return [self.read(T.min(first + index, last)) for index in range(TOGETHER)]

    def visit(self, emit: Callable[[v.Expr, list[Place], list[Place]], None]) -> None:
        """Call ``emit(first place, neurons, neurons of the next turn)`` for all turns."""
        with T.serial(self.count_turns()) as turn:
            first = v.let(turn * TOGETHER)
            emit(first, self.take(first), self.take(first + TOGETHER))
