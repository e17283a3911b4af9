"""The neuron cache: look-up and replacement, one pass over its arrays each, without a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.host.spec import FOUND

if TYPE_CHECKING:
    from pi2.backends.compiler.parameters import Parameters


def emit_find_neurons(take: Parameters) -> None:
    """Divide ``indices`` [count] into cold slots of those in memory, whose use is counted, and
    indices of the others; ``found`` [1] becomes the number of the former."""
    count = take.take_number("count")
    first_key = take.take_number("first_key")
    first_cold = take.take_number("first_cold")
    clock = take.take_number("clock", "int64")
    weight = take.take_number("weight", "float32")
    row = take.take_given_array("row", "int32")
    indices = take.take_given_array("indices", "int32")
    uses = _Uses(take)
    cold = take.take_given_array("cold", "int32")
    missing = take.take_given_array("missing", "int32")
    found = take.take_array("found", "int32", FOUND)
    present, absent = v.Cell(T.int32(0)), v.Cell(T.int32(0))
    with T.serial(count) as place:
        index = v.let(indices[place])
        slot = v.let(row[index])
        with T.If(slot >= 0):
            with T.Then():
                uses.count(index + first_key, slot - first_cold, weight, clock)
                v.store(cold, present.get(), slot - first_cold, 1)
                present.set(present.get() + 1)
            with T.Else():
                v.store(missing, absent.get(), index, 1)
                absent.set(absent.get() + 1)
    v.store(found, 0, present.get(), 1)


def emit_place_neurons(take: Parameters) -> None:
    """Give slots out of ``candidates`` [size] that nobody has used since they were listed, and
    nobody holds, to ``missing`` [count], as far as they go.

    ``found`` [3] becomes: neurons that have a slot, candidates that were looked at, and neurons
    that left.
    """
    count = take.take_number("count")
    size = take.take_number("size")
    first_key = take.take_number("first_key")
    first_cold = take.take_number("first_cold")
    clock = take.take_number("clock", "int64")
    listed_at = take.take_number("listed_at", "int64")
    weight = take.take_number("weight", "float32")
    missing = take.take_given_array("missing", "int32")
    candidates = take.take_given_array("candidates", "int32")
    held = take.take_given_array("held", "uint8")
    slot_of = take.take_given_array("slot_of", "int32")
    owner = take.take_given_array("owner", "int64")
    uses = _Uses(take)
    given = take.take_given_array("given", "int32")
    found = take.take_array("found", "int32", FOUND)
    placed, seen, left = (v.Cell(T.int32(0)) for _ in range(3))
    with T.While(T.And(placed.get() < count, seen.get() < size)):
        cell = v.let(candidates[seen.get()])
        seen.set(seen.get() + 1)
        with T.If(T.And(uses.used_at[cell] <= listed_at, held[cell] == T.uint8(0))), T.Then():
            old = v.let(owner[cell])
            with T.If(old >= T.int64(0)), T.Then():
                v.store(slot_of, old, T.int32(-1), 1)
                left.set(left.get() + 1)
            key = v.let(missing[placed.get()] + first_key)
            v.store(owner, cell, v.wide(key), 1)
            v.store(slot_of, key, cell + first_cold, 1)
            uses.count(key, cell, weight, clock)
            v.store(given, placed.get(), cell, 1)
            placed.set(placed.get() + 1)
    for place, value in enumerate((placed, seen, left)):
        v.store(found, place, value.get(), 1)


class _Uses:
    """The arrays in which uses are counted."""

    def __init__(self, take: Parameters) -> None:
        self.counts = take.take_given_array("counts", "float32")
        self.scores = take.take_given_array("scores", "float32")
        self.used_at = take.take_given_array("used_at", "int64")

    def count(self, key: v.Expr, cell: v.Expr, weight: v.Expr, clock: v.Expr) -> None:
        """Count a use of the neuron ``key`` in the cold slot ``cell``."""
        key, cell = v.let(key), v.let(cell)
        value = v.let(self.counts[key] + weight)
        v.store(self.counts, key, value, 1)
        v.store(self.scores, cell, value, 1)
        v.store(self.used_at, cell, clock, 1)
