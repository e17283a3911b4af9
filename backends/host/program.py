"""The functions of the host loops' library; `pi2.memory.host_loops` says what each does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import make_target
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.host.residency import emit_find_neurons, emit_place_neurons, emit_unite_named
from pi2.backends.host.ring import (
    emit_drive_ring,
    emit_fill_entries,
    emit_plan_reads,
    emit_read_runs,
    emit_submit_reads,
)
from pi2.memory.host_loops import CHECKED_BYTES, CheckInstruction, HostSpec

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
    """Return what has the remainder of ``block`` and lies where ``factors`` take it."""
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
