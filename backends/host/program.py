"""The functions of the host loops' library; `pi2.memory.host_loops` says what each does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import make_target
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.host.ring import (
    emit_drive_ring,
    emit_fill_entries,
    emit_plan_reads,
    emit_read_runs,
    emit_submit_reads,
)
from pi2.memory.host_loops import CHECKED_BYTES, FOUND, MASSES, CheckInstruction, HostSpec

if TYPE_CHECKING:
    from pi2.backends.compiler.vectors import Parameters


def emit_unite_named(take: Parameters) -> None:
    """Set bit k of ``named`` int64 [neurons] for the neurons of list k of ``lists``; the lists are
    one behind the other in ``flat``, and list k ends at ``ends`` [k]. Clear all other bits.
    ``united`` [neurons] becomes the neurons with a bit, ascending, ``found`` [0] their number."""
    lists, neurons = take.take_number("lists"), take.take_number("neurons")
    ends = take.take_given_array("ends", "int32")
    flat = take.take_given_array("flat", "int32")
    named = take.take_given_array("named", "int64")
    united = take.take_given_array("united", "int32")
    found = take.take_array("found", "int32", FOUND)
    with T.serial(neurons) as neuron:
        v.store(named, neuron, T.int64(0), 1)
    begin = v.Cell(T.int32(0))
    with T.serial(lists) as number:
        bit = v.let(T.int64(1) << v.wide(number))
        with T.serial(ends[number] - begin.get()) as step:
            neuron = v.let(flat[begin.get() + step])
            v.store(named, neuron, named[neuron] | bit, 1)
        begin.set(ends[number])
    count = v.Cell(T.int32(0))
    with T.serial(neurons) as neuron:
        # What no list has is overwritten by the next one.
        v.store(united, count.get(), neuron, 1)
        count.set(count.get() + T.Select(named[neuron] != T.int64(0), T.int32(1), T.int32(0)))
    v.store(found, 0, count.get(), 1)


def emit_find_neurons(take: Parameters) -> None:
    """Find ``indices`` [count] (ascending), count the use of those in cold slots, and give slots
    out of ``candidates`` [size] to the missing ones, as `emit_place_neurons` does.

    Ends before the first cold neuron for which there is no ``room``.  Hot are those from
    ``first_hot`` on, before ``end_hot``; the first of them is in slot ``hot_slot``.  If it
    ``sieves``, missing ones behind the hot ones whose ``marks`` [neurons] are below ``least`` are
    left out, as `pi2.memory.read_sieve` says; ``masses`` [3] becomes the mass of all that were
    looked for, of those that were left out, and of those that would be with any ``allowance``.

    ``lists`` [4 count] gets four lists, at 0, count, ...: slots of those in memory, the hot ones
    first; indices of the missing ones; slots that these have been given; the cold ones of all these
    slots, counted from the first cold one.  ``found`` [8] becomes: neurons that were looked for,
    those in memory, hot ones among them, missing ones, those of them that have a slot, candidates
    that were looked at, neurons that left, and those that were left out."""
    count, room = take.take_number("count"), take.take_number("room")
    first_hot, end_hot = take.take_number("first_hot"), take.take_number("end_hot")
    hot_slot = take.take_number("hot_slot")
    size = take.take_number("size")
    first_key = take.take_number("first_key")
    first_cold = take.take_number("first_cold")
    clock = take.take_number("clock", "int64")
    listed_at = take.take_number("listed_at", "int64")
    weight = take.take_number("weight", "float64")
    growth = take.take_number("growth", "float64")
    sieves = take.take_number("sieves")
    least = take.take_number("least", "float32")
    beside = take.take_number("beside", "float32")
    zero = take.take_number("zero", "float32")
    allowance = take.take_number("allowance", "float64")
    marks = take.take_given_array("marks", "float32")
    row = take.take_given_array("row", "int32")
    indices = take.take_given_array("indices", "int32")
    candidates = take.take_given_array("candidates", "int32")
    held = take.take_given_array("held", "uint8")
    slot_of = take.take_given_array("slot_of", "int32")
    owner = take.take_given_array("owner", "int64")
    uses = _Uses(take)
    lists = take.take_given_array("lists", "int32")
    found = take.take_array("found", "int32", FOUND)
    masses = take.take_array("masses", "float64", MASSES)
    hot, cold, absent, taken, skipped = (v.Cell(T.int32(0)) for _ in range(5))
    sieve = _Sieve(marks, row, indices, count, (least, beside, zero, allowance))
    is_over = v.Cell(T.int32(0))
    light = v.let(T.cast(weight, "float32"))
    with T.While(T.And(taken.get() < count, is_over.get() == 0)):
        index = v.let(indices[taken.get()])
        with T.If(sieves > 0), T.Then():
            sieve.weigh(index)
        with T.If(T.And(index >= first_hot, index < end_hot)):
            with T.Then():
                v.store(lists, hot.get(), index - first_hot + hot_slot, 1)
                hot.set(hot.get() + 1)
                taken.set(taken.get() + 1)
            with T.Else():
                slot = v.let(row[index])
                is_sieved = v.Cell(T.int32(0))
                with T.If(T.And(T.And(sieves > 0, slot < 0), index >= end_hot)), T.Then():
                    sieve.judge(index, taken.get(), is_sieved)
                with T.If(is_sieved.get() > 0):
                    with T.Then():
                        skipped.set(skipped.get() + 1)
                        taken.set(taken.get() + 1)
                    with T.Else():
                        with T.If(cold.get() + absent.get() == room):
                            with T.Then():
                                is_over.set(T.int32(1))
                            with T.Else():
                                taken.set(taken.get() + 1)
                                with T.If(slot >= 0):
                                    with T.Then():
                                        cell = v.let(slot - first_cold)
                                        uses.count(index + first_key, cell, light, clock)
                                        v.store(lists, count * 3 + cold.get(), cell, 1)
                                        cold.set(cold.get() + 1)
                                    with T.Else():
                                        v.store(lists, count + absent.get(), index, 1)
                                        absent.set(absent.get() + 1)
    v.store(masses, 0, sieve.mass.get(), 1)
    v.store(masses, 1, sieve.left.get(), 1)
    v.store(masses, 2, sieve.tried.get(), 1)
    with T.serial(cold.get()) as place:
        v.store(lists, hot.get() + place, lists[count * 3 + place] + first_cold, 1)
    # What came first makes what comes now count more.
    uses_before = T.cast(cold.get(), "float64")
    heavy = v.let(T.cast(weight * (T.float64(1.0) + growth * uses_before), "float32"))
    given = _Places(candidates, size, held, slot_of, owner, listed_at, first_key, first_cold)

    def give(place: v.Expr, cell: v.Expr) -> None:
        v.store(lists, count * 2 + place, cell + first_cold, 1)
        v.store(lists, count * 3 + cold.get() + place, cell, 1)

    def find_missing(place: v.Expr) -> v.Expr:
        return lists[count + place]

    placed, seen, left = given.emit(absent.get(), find_missing, uses, heavy, clock, give)
    numbers = (
        taken.get(),
        hot.get() + cold.get(),
        hot.get(),
        absent.get(),
        placed.get(),
        seen.get(),
        left.get(),
        skipped.get(),
    )
    for place, value in enumerate(numbers):
        v.store(found, place, value, 1)


def emit_place_neurons(take: Parameters) -> None:
    """Give slots out of ``candidates`` [size] to ``missing`` [count], as far as they go; the slots
    must be unused since they were listed, and held by nothing.

    ``found`` [3] becomes: neurons that have a slot, inspected candidates, and evicted neurons."""
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
    places = _Places(candidates, size, held, slot_of, owner, listed_at, first_key, first_cold)

    def give(place: v.Expr, cell: v.Expr) -> None:
        v.store(given, place, cell, 1)

    numbers = places.emit(count, lambda place: missing[place], uses, weight, clock, give)
    for place, value in enumerate(numbers):
        v.store(found, place, value.get(), 1)


class _Sieve:
    """Which missing neurons are worth a read: `pi2.memory.read_sieve.ReadSieve.choose`."""

    def __init__(
        self,
        marks: v.Buffer,
        row: v.Buffer,
        indices: v.Buffer,
        count: v.Expr,
        limits: tuple[v.Expr, v.Expr, v.Expr, v.Expr],
    ) -> None:
        """``limits``: least mark, mark of neighbours, mark of no mass, allowance (`ReadLimits`)."""
        self._marks, self._row, self._indices, self._count = marks, row, indices, count
        self._least, self._beside, self._zero, self._allowance = limits
        self.mass, self.left, self.tried = (v.Cell(T.float64(0.0)) for _ in range(3))
        self._last_sure = v.Cell(T.int32(-2))
        """The last missing neuron that is read for its own score."""

    def weigh(self, index: v.Expr) -> None:
        """Add the mass of the neuron ``index``."""
        self.mass.set(self.mass.get() + T.cast(self._marks[index] - self._zero, "float64"))

    def judge(self, index: v.Expr, place: v.Expr, is_sieved: v.Cell) -> None:
        """Set ``is_sieved`` to 1 if the missing neuron ``index``, at ``place``, is left out."""
        mark = v.let(self._marks[index])
        with T.If(mark >= self._least):
            with T.Then():
                self._last_sure.set(index)
            with T.Else():
                is_beside = v.Cell(T.int32(0))
                with T.If(mark >= self._beside), T.Then():
                    with T.If(self._last_sure.get() == index - 1):
                        with T.Then():
                            is_beside.set(T.int32(1))
                        with T.Else():
                            self._look_behind(index, place, is_beside)
                with T.If(is_beside.get() == 0), T.Then():
                    mass = v.let(T.cast(mark - self._zero, "float64"))
                    self.tried.set(self.tried.get() + mass)
                    with T.If(self.tried.get() <= self._allowance), T.Then():
                        self.left.set(self.left.get() + mass)
                        is_sieved.set(T.int32(1))

    def _look_behind(self, index: v.Expr, place: v.Expr, is_beside: v.Cell) -> None:
        """Set ``is_beside`` to 1 if the neuron behind ``index`` is read for its own score."""
        with T.If(place + 1 < self._count), T.Then():
            following = v.let(self._indices[place + 1])
            with T.If(following == index + 1), T.Then():
                is_sure = T.And(self._row[following] < 0, self._marks[following] >= self._least)
                with T.If(is_sure), T.Then():
                    is_beside.set(T.int32(1))


@dataclass(frozen=True)
class _Places:
    candidates: v.Buffer
    size: v.Expr
    held: v.Buffer
    slot_of: v.Buffer
    owner: v.Buffer
    listed_at: v.Expr
    first_key: v.Expr
    first_cold: v.Expr

    def emit(
        self,
        count: v.Expr,
        find_missing: Callable[[v.Expr], v.Expr],
        uses: _Uses,
        weight: v.Expr,
        clock: v.Expr,
        give: Callable[[v.Expr, v.Expr], None],
    ) -> tuple[v.Cell, v.Cell, v.Cell]:
        """Give slots to the ``count`` neurons whose indices ``find_missing`` returns; ``give`` is
        told each one's place and cold slot.

        Returns how many have a slot, inspected candidates, and evicted neurons."""
        count = v.let(count)
        placed, seen, left = (v.Cell(T.int32(0)) for _ in range(3))
        with T.While(T.And(placed.get() < count, seen.get() < self.size)):
            cell = v.let(self.candidates[seen.get()])
            seen.set(seen.get() + 1)
            is_free = T.And(uses.used_at[cell] <= self.listed_at, self.held[cell] == T.uint8(0))
            with T.If(is_free), T.Then():
                old = v.let(self.owner[cell])
                with T.If(old >= T.int64(0)), T.Then():
                    v.store(self.slot_of, old, T.int32(-1), 1)
                    left.set(left.get() + 1)
                key = v.let(find_missing(placed.get()) + self.first_key)
                v.store(self.owner, cell, v.wide(key), 1)
                v.store(self.slot_of, key, cell + self.first_cold, 1)
                uses.count(key, cell, weight, clock)
                give(placed.get(), cell)
                placed.set(placed.get() + 1)
        return placed, seen, left


class _Uses:
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


_POLYNOMIAL = 0x104C11DB7
_BLOCK = 16
_LOW, _HIGH = 0x00, 0x11
"""Which halves of both operands are multiplied."""


def emit_compute_checks(instruction: CheckInstruction, take: Parameters) -> None:
    """Write the CRC-32 of bundles ``slots`` [count] of ``arena``, ``stride`` bytes each, a multiple
    of `CHECKED_BYTES`, to ``checks`` [count].  ``table`` [256]: what remains of every byte."""
    count = take.take_number("count")
    stride = take.take_number("stride", "int64")
    arena = take.take_given_array("arena", "uint8")
    slots = take.take_given_array("slots", "int32")
    table = take.take_array("table", "uint32", 256)
    checks = take.take_given_array("checks", "uint32")
    emit: Callable[[v.Buffer, v.Expr, v.Expr, v.Buffer], v.Expr]
    emit = _emit_products if instruction == "pclmulqdq" else _emit_words
    with T.serial(count) as place:
        base = v.let(v.wide(slots[place]) * stride)
        register = emit(arena, base, stride, table)
        v.store(checks, place, T.bitwise_not(register), 1)


def _emit_words(arena: v.Buffer, base: v.Expr, stride: v.Expr, table: v.Buffer) -> v.Expr:
    """Return the register after all bytes, 8 at a time."""
    register = v.Cell(T.uint32(0xFFFFFFFF))
    with T.serial(T.floordiv(stride, T.int64(CHECKED_BYTES))) as block:
        for word in range(0, CHECKED_BYTES, 8):
            value = v.load_as(arena, base + block * CHECKED_BYTES + word, "int64", 1)
            register.set(
                T.call_llvm_pure_intrin("uint32", "llvm.aarch64.crc32x", register.get(), value)
            )
    return register.get()


def _emit_products(arena: v.Buffer, base: v.Expr, stride: v.Expr, table: v.Buffer) -> v.Expr:
    """Return the register after all bytes, 64 at a time."""
    once = T.int64(0)
    blocks = [
        v.Cell(v.load_as(arena, base + once + start, "int64", 2))
        for start in range(0, CHECKED_BYTES, _BLOCK)
    ]
    # The register begins with ones: it meets the first four bytes.
    begin = T.Shuffle([T.int64(0xFFFFFFFF), T.int64(0)], [0, 1])
    blocks[0].set(blocks[0].get() ^ begin)
    far, near = _list_factors(CHECKED_BYTES), _list_factors(_BLOCK)
    with T.serial(T.floordiv(stride, T.int64(CHECKED_BYTES)) - T.int64(1)) as step:
        for number, block in enumerate(blocks):
            start = base + (step + T.int64(1)) * CHECKED_BYTES + number * _BLOCK
            block.set(_move(block.get(), far) ^ v.load_as(arena, start, "int64", 2))
    rest = v.let(blocks[0].get())
    for block in blocks[1:]:
        rest = v.let(_move(rest, near) ^ block.get())
    register = v.Cell(T.uint32(0))
    for half in range(2):
        word = v.let(T.reinterpret(v.take_lane(rest, half), dtype="uint64"))
        for byte in range(8):
            value = T.cast(word >> T.uint64(8 * byte), "uint32")
            index = T.bitwise_and(T.bitwise_xor(register.get(), value), T.uint32(255))
            shifted = register.get() >> T.uint32(8)
            register.set(T.bitwise_xor(table[T.cast(index, "int32")], shifted))
    return register.get()


def _move(block: v.Expr, factors: tuple[int, int]) -> v.Expr:
    """Return a block that has the remainder of ``block`` and lies where ``factors`` take it."""
    pair = T.Shuffle([T.int64(factors[0]), T.int64(factors[1])], [0, 1])
    low, high = (
        T.call_llvm_pure_intrin("int64x2", "llvm.x86.pclmulqdq", block, pair, T.int8(halves))
        for halves in (_LOW, _HIGH)
    )
    return low ^ high


def _list_factors(size_bytes: int) -> tuple[int, int]:
    """What the halves of a block are multiplied by to move ``size_bytes`` on."""
    bits = 8 * size_bytes
    return _take_power(bits + 32), _take_power(bits - 32)


def _take_power(exponent: int) -> int:
    value = 1
    for _ in range(exponent):
        value <<= 1
        value ^= _POLYNOMIAL if value >> 32 else 0
    return int(f"{value:032b}"[::-1], 2) << 1


def read_program(text: str) -> Program:
    return Program(HostSpec.from_json(text))


class Program:
    """Loops for the machine that compiles them."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec

    @property
    def target(self) -> tvm.target.Target:
        """The least processor of this machine's architecture that has the instruction of checks."""
        return make_target(self._spec)

    def list_functions(self) -> dict[str, Callable[[Parameters], None]]:
        functions: dict[str, Callable[[Parameters], None]] = {
            "read_runs": emit_read_runs,
            "plan_reads": emit_plan_reads,
            "fill_entries": emit_fill_entries,
            "drive_ring": partial(emit_drive_ring, self._spec.architecture),
            "submit_reads": partial(emit_submit_reads, self._spec.architecture),
            "unite_named": emit_unite_named,
            "find_neurons": emit_find_neurons,
            "place_neurons": emit_place_neurons,
        }
        if self._spec.checks is not None:
            functions["compute_checks"] = partial(emit_compute_checks, self._spec.checks)
        return functions
