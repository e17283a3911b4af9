"""The program that answers messages (`pi2.backends.hexagon.messages`) under Linux, as the emulator
has it: standard input brings messages, standard output takes replies.

It is TensorIR like the kernels, so that no C compiler is needed; LLVM's assembler has the one
instruction that calls the system.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.hexagon import messages as m
from pi2.backends.hexagon.kernels import code as c
from pi2.backends.hexagon.specification import Graph

_READ, _WRITE, _EXIT, _CLOCK, _MAP = 63, 64, 94, 113, 222
"""Numbers of the system's calls."""
_MONOTONIC = 1
_READ_WRITE, _SHARED = 3, 1
_SYSTEM_CALL = """
define i32 @pi2_call_system(i32 %n, i32 %a, i32 %b, i32 %c, i32 %d, i32 %e, i32 %f) {
  %r = call i32 asm sideeffect "trap0(#1)",
    "={r0},{r6},{r0},{r1},{r2},{r3},{r4},{r5},~{memory}"(
    i32 %n, i32 %a, i32 %b, i32 %c, i32 %d, i32 %e, i32 %f)
  ret i32 %r
}
"""
"""In LLVM's language: ``r6`` has the number, ``r0`` to ``r5`` have what the call is given."""


def _call_system(number: int, *operands: c.Expr) -> c.Expr:
    given = [*operands, *[T.int32(0)] * (6 - len(operands))]
    return T.call_extern("int32", "pi2_call_system", T.int32(number), *given)


def _find_address(buffer: c.Buffer, word: c.Expr) -> c.Expr:
    """Return the address of a word as an int32."""
    return T.cast(T.reinterpret(T.address_of(buffer[word]), dtype="uint64"), "int32")


def emit_worker(index: Sequence[Graph]) -> None:
    """The program's entry: answer messages until there are no more."""
    with T.attr(T.int32(0), "pragma_import_llvm", _SYSTEM_CALL):
        message = T.alloc_buffer((m.WORDS,), "int32")
        reply = T.alloc_buffer((m.REPLY_WORDS,), "int32")
        memory, failure = v.Cell(T.int32(0)), v.Cell(T.int32(0))
        _emit_read(message)
        c.write(reply, 0, T.int32(m.MAGIC))
        for word in range(1, m.REPLY_WORDS):
            c.write(reply, word, T.int32(0))
        with T.If(message[1] == m.PROTOCOL):
            with T.Then():
                mapped = _call_system(
                    _MAP,
                    T.int32(0),
                    message[3],
                    T.int32(_READ_WRITE),
                    T.int32(_SHARED),
                    message[2],
                    T.int32(0),
                )
                memory.set(mapped)
                # The last page of addresses stands for errors.
                with T.If(T.cast(memory.get(), "uint32") > T.uint32(2**32 - 4096)), T.Then():
                    failure.set(T.int32(1))
            with T.Else():
                failure.set(T.int32(3))
        c.write(reply, 1, T.int32(m.PROTOCOL))
        c.write(reply, 2, failure.get())
        c.write(reply, 3, T.int32(len(index)))
        _emit_write(reply)
        c.write(reply, 3, T.int32(0))
        with T.While(failure.get() == 0):
            _emit_read(message)
            c.write(reply, 1, message[1])
            _emit_clock(reply, 4)
            failure.set(T.int32(0))
            graph = v.let(message[2])
            is_known = T.And(graph >= 0, graph < len(index))
            with T.If(is_known), T.Then():
                operands = _find_address(message, T.int32(4))
                c.call("pi2_run", memory.get(), graph, operands)
            with T.If(T.And(T.Not(is_known), graph != -1)), T.Then():
                failure.set(T.int32(2))
            _emit_clock(reply, 6)
            c.write(reply, 2, failure.get())
            _emit_write(reply)
        T.evaluate(_call_system(_EXIT, T.int32(0)))


def _emit_read(message: c.Buffer) -> None:
    """Read a whole message; the program ends where there is none."""
    done = v.Cell(T.int32(0))
    size = m.MESSAGE.size
    with T.While(done.get() < size):
        place = _find_address(message, T.int32(0)) + done.get()
        count = v.let(_call_system(_READ, T.int32(0), place, size - done.get()))
        with T.If(count <= 0), T.Then():
            T.evaluate(_call_system(_EXIT, T.int32(0)))
        done.set(done.get() + count)


def _emit_write(reply: c.Buffer) -> None:
    """Write the reply; short writes do not happen to so few bytes of a pipe."""
    place = _find_address(reply, T.int32(0))
    T.evaluate(_call_system(_WRITE, T.int32(1), place, T.int32(m.REPLY.size)))


def _emit_clock(reply: c.Buffer, word: int) -> None:
    """Write seconds and nanoseconds."""
    place = _find_address(reply, T.int32(word))
    T.evaluate(_call_system(_CLOCK, T.int32(_MONOTONIC), place))


def emit_count(index: Sequence[Graph], address: c.Expr) -> None:
    """Write the number of graphs to ``address``."""
    c.write(c.view(address, "int32"), 0, T.int32(len(index)))


def emit_run(index: Sequence[Graph], memory: c.Expr, graph: c.Expr, operands: c.Expr) -> None:
    """Run a graph of the index; numbers beyond it do nothing."""
    for number, item in enumerate(index):
        with T.If(graph == number), T.Then():
            c.call(item.name, memory, operands)
