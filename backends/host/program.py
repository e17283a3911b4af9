"""The functions of the host loops' library; `pi2.memory.host_loops` says what each does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import make_target
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.host.ring import (
    Given,
    emit_drive_ring,
    emit_fill_entries,
    emit_plan_reads,
    emit_read_runs,
    emit_submit_reads,
)
from pi2.memory.host_loops import CHECKED_BYTES, CheckInstruction, HostSpec


def emit_unite_named(own: Given) -> None:
    """Set bit k of ``named`` int64 [neurons] for the neurons of list k of ``number``; the lists are
    one behind the other in ``flat``, and list k ends at ``ends`` [k]. Clear all other bits.
    ``united`` [neurons] becomes the neurons with a bit, ascending, ``found`` [0] their number."""
    named = own.named
    with T.serial(own.neurons) as neuron:
        v.store(named, neuron, T.int64(0), 1)
    begin = v.Cell(T.int32(0))
    with T.serial(own.number) as number:
        bit = v.let(T.int64(1) << v.wide(number))
        with T.serial(own.ends[number] - begin.get()) as step:
            neuron = v.let(own.flat[begin.get() + step])
            v.store(named, neuron, named[neuron] | bit, 1)
        begin.set(own.ends[number])
    count = v.Cell(T.int32(0))
    with T.serial(own.neurons) as neuron:
        # What no list has is overwritten by the next one.
        v.store(own.united, count.get(), neuron, 1)
        count.set(count.get() + T.Select(named[neuron] != T.int64(0), T.int32(1), T.int32(0)))
    v.store(own.found, 0, count.get(), 1)


def emit_find_neurons(own: Given) -> None:
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
    lists, count = own.lists, own.count
    hot, cold, absent, taken, skipped = (v.Cell(T.int32(0)) for _ in range(5))
    sieve = _Sieve(own)
    is_over = v.Cell(T.int32(0))
    light = v.let(T.cast(own.weight, "float32"))
    with T.While(T.And(taken.get() < count, is_over.get() == 0)):
        index = v.let(own.indices[taken.get()])
        with T.If(own.sieves > 0), T.Then():
            sieve.weigh(index)
        with T.If(T.And(index >= own.first_hot, index < own.end_hot)):
            with T.Then():
                v.store(lists, hot.get(), index - own.first_hot + own.hot_slot, 1)
                hot.set(hot.get() + 1)
                taken.set(taken.get() + 1)
            with T.Else():
                slot = v.let(own.row[index])
                is_sieved = v.Cell(T.int32(0))
                with T.If(T.And(T.And(own.sieves > 0, slot < 0), index >= own.end_hot)), T.Then():
                    sieve.judge(index, taken.get(), is_sieved)
                with T.If(is_sieved.get() > 0):
                    with T.Then():
                        skipped.set(skipped.get() + 1)
                        taken.set(taken.get() + 1)
                    with T.Else():
                        with T.If(cold.get() + absent.get() == own.room):
                            with T.Then():
                                is_over.set(T.int32(1))
                            with T.Else():
                                taken.set(taken.get() + 1)
                                with T.If(slot >= 0):
                                    with T.Then():
                                        cell = v.let(slot - own.first_cold)
                                        _count_use(own, index + own.first_key, cell, light)
                                        v.store(lists, count * 3 + cold.get(), cell, 1)
                                        cold.set(cold.get() + 1)
                                    with T.Else():
                                        v.store(lists, count + absent.get(), index, 1)
                                        absent.set(absent.get() + 1)
    v.store(own.masses, 0, sieve.mass.get(), 1)
    v.store(own.masses, 1, sieve.left.get(), 1)
    v.store(own.masses, 2, sieve.tried.get(), 1)
    with T.serial(cold.get()) as place:
        v.store(lists, hot.get() + place, lists[count * 3 + place] + own.first_cold, 1)
    # What came first makes what comes now count more.
    uses_before = T.cast(cold.get(), "float64")
    heavy = v.let(T.cast(own.weight * (T.float64(1.0) + own.growth * uses_before), "float32"))

    def give(place: v.Expr, cell: v.Expr) -> None:
        v.store(lists, count * 2 + place, cell + own.first_cold, 1)
        v.store(lists, count * 3 + cold.get() + place, cell, 1)

    def find_missing(place: v.Expr) -> v.Expr:
        return lists[count + place]

    placed, seen, left = _emit_places(own, absent.get(), find_missing, heavy, give)
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
        v.store(own.found, place, value, 1)


def emit_place_neurons(own: Given) -> None:
    """Give slots out of ``candidates`` [size] to ``missing`` [count], as far as they go; the slots
    must be unused since they were listed, and held by nothing.

    ``found`` [3] becomes: neurons that have a slot, inspected candidates, and evicted neurons."""
    missing = own.missing

    def give(place: v.Expr, cell: v.Expr) -> None:
        v.store(own.given, place, cell, 1)

    weight = v.let(T.cast(own.weight, "float32"))
    numbers = _emit_places(own, own.count, lambda place: missing[place], weight, give)
    for place, value in enumerate(numbers):
        v.store(own.found, place, value.get(), 1)


class _Sieve:
    """Which missing neurons are worth a read: `pi2.memory.read_sieve.ReadSieve.choose`."""

    def __init__(self, own: Given) -> None:
        self._own = own
        self.mass, self.left, self.tried = (v.Cell(T.float64(0.0)) for _ in range(3))
        self._last_sure = v.Cell(T.int32(-2))
        """The last missing neuron that is read for its own score."""

    def weigh(self, index: v.Expr) -> None:
        """Add the mass of the neuron ``index``."""
        self.mass.set(self.mass.get() + T.cast(self._own.marks[index] - self._own.zero, "float64"))

    def judge(self, index: v.Expr, place: v.Expr, is_sieved: v.Cell) -> None:
        """Set ``is_sieved`` to 1 if the missing neuron ``index``, at ``place``, is left out."""
        mark = v.let(self._own.marks[index])
        with T.If(mark >= self._own.least):
            with T.Then():
                self._last_sure.set(index)
            with T.Else():
                is_beside = v.Cell(T.int32(0))
                with T.If(mark >= self._own.near), T.Then():
                    with T.If(self._last_sure.get() == index - 1):
                        with T.Then():
                            is_beside.set(T.int32(1))
                        with T.Else():
                            self._look_behind(index, place, is_beside)
                with T.If(is_beside.get() == 0), T.Then():
                    mass = v.let(T.cast(mark - self._own.zero, "float64"))
                    self.tried.set(self.tried.get() + mass)
                    with T.If(self.tried.get() <= self._own.allowance), T.Then():
                        self.left.set(self.left.get() + mass)
                        is_sieved.set(T.int32(1))

    def _look_behind(self, index: v.Expr, place: v.Expr, is_beside: v.Cell) -> None:
        """Set ``is_beside`` to 1 if the neuron behind ``index`` is read for its own score."""
        with T.If(place + 1 < self._own.count), T.Then():
            following = v.let(self._own.indices[place + 1])
            with T.If(following == index + 1), T.Then():
                is_sure = T.And(
                    self._own.row[following] < 0, self._own.marks[following] >= self._own.least
                )
                with T.If(is_sure), T.Then():
                    is_beside.set(T.int32(1))


def _emit_places(
    own: Given,
    count: v.Expr,
    find_missing: Callable[[v.Expr], v.Expr],
    weight: v.Expr,
    give: Callable[[v.Expr, v.Expr], None],
) -> tuple[v.Cell, v.Cell, v.Cell]:
    """Give slots to the ``count`` neurons whose indices ``find_missing`` returns; ``give`` is told
    each one's place and cold slot.

    Returns how many have a slot, inspected candidates, and evicted neurons."""
    count = v.let(count)
    placed, seen, left = (v.Cell(T.int32(0)) for _ in range(3))
    with T.While(T.And(placed.get() < count, seen.get() < own.size)):
        cell = v.let(own.candidates[seen.get()])
        seen.set(seen.get() + 1)
        is_free = T.And(own.used_at[cell] <= own.listed_at, own.held[cell] == T.uint8(0))
        with T.If(is_free), T.Then():
            old = v.let(own.owner[cell])
            with T.If(old >= T.int64(0)), T.Then():
                v.store(own.slot_of, old, T.int32(-1), 1)
                left.set(left.get() + 1)
            key = v.let(find_missing(placed.get()) + own.first_key)
            v.store(own.owner, cell, v.wide(key), 1)
            v.store(own.slot_of, key, cell + own.first_cold, 1)
            _count_use(own, key, cell, weight)
            give(placed.get(), cell)
            placed.set(placed.get() + 1)
    return placed, seen, left


def _count_use(own: Given, key: v.Expr, cell: v.Expr, weight: v.Expr) -> None:
    """Count a use of the neuron ``key`` in the cold slot ``cell``."""
    key, cell = v.let(key), v.let(cell)
    value = v.let(own.use_counts[key] + weight)
    v.store(own.use_counts, key, value, 1)
    v.store(own.scores, cell, value, 1)
    v.store(own.used_at, cell, own.clock, 1)


_POLYNOMIAL = 0x104C11DB7
_BLOCK = 16
_LOW, _HIGH = 0x00, 0x11
"""Which halves of both operands are multiplied."""


def emit_compute_checks(instruction: CheckInstruction, own: Given) -> None:
    """Write the CRC-32 of bundles ``slots`` [count] of ``arena``, ``stride`` bytes each, a multiple
    of `CHECKED_BYTES`, to ``checks`` [count].  ``table`` [256]: what remains of every byte."""
    emit: Callable[[v.Buffer, v.Expr, v.Expr, v.Buffer], v.Expr]
    emit = _emit_products if instruction == "pclmulqdq" else _emit_words
    with T.serial(own.count) as place:
        base = v.let(v.wide(own.slots[place]) * own.stride)
        register = emit(own.arena, base, own.stride, own.table)
        v.store(own.checks, place, T.bitwise_not(register), 1)


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
        architecture, checks = self._spec.architecture, self._spec.checks
        loops: dict[str, Callable[[Given], None]] = {
            "read_runs": emit_read_runs,
            "plan_reads": emit_plan_reads,
            "fill_entries": emit_fill_entries,
            "drive_ring": partial(emit_drive_ring, architecture),
            "submit_reads": partial(emit_submit_reads, architecture),
            "unite_named": emit_unite_named,
            "find_neurons": emit_find_neurons,
            "place_neurons": emit_place_neurons,
        }
        if checks is not None:
            loops["compute_checks"] = partial(emit_compute_checks, checks)
        return {name: partial(emit_loop, name, emit) for name, emit in loops.items()}


def emit_loop(name: str, emit: Callable[[Given], None], take: Parameters) -> None:
    """Declare what a loop takes, and add its body."""
    emit(Given(name, take))
