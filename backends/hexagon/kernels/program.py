"""The functions of a library: kernels, graphs, and what runs a graph by its number."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import Report, generate_plain
from pi2.backends.compiler.linking import LinkError
from pi2.backends.compiler.signature import find_signatures
from pi2.backends.hexagon import session
from pi2.backends.hexagon.arrays import FFN_OPERANDS, NUMBERS, PRODUCT_OPERANDS
from pi2.backends.hexagon.kernels import ffn
from pi2.backends.hexagon.linkers import LINKERS, find_linker
from pi2.backends.hexagon.specification import (
    LANES,
    LAYOUTS,
    OBJECT,
    FfnGraph,
    FfnShape,
    Graph,
    HexagonSpec,
    ProductGraph,
    count_together,
)

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


def _call_system(number: int, *operands: ffn.Expr) -> ffn.Expr:
    given = [*operands, *[T.int32(0)] * (6 - len(operands))]
    return T.call_extern("int32", "pi2_call_system", T.int32(number), *given)


def _find_address(buffer: ffn.Buffer, word: ffn.Expr) -> ffn.Expr:
    """Return the address of a word as an int32."""
    return T.cast(T.reinterpret(T.address_of(buffer[word]), dtype="uint64"), "int32")


def emit_worker(index: Sequence[Graph]) -> None:
    """The program's entry: answer messages until there are no more."""
    with T.attr(T.int32(0), "pragma_import_llvm", _SYSTEM_CALL):
        message = T.alloc_buffer((session.WORDS,), "int32")
        reply = T.alloc_buffer((session.REPLY_WORDS,), "int32")
        memory, failure = v.Cell(T.int32(0)), v.Cell(T.int32(0))
        _emit_read(message)
        v.store(reply, 0, T.int32(session.MAGIC), 1)
        for word in range(1, session.REPLY_WORDS):
            v.store(reply, word, T.int32(0), 1)
        with T.If(message[1] == session.PROTOCOL):
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
        v.store(reply, 1, T.int32(session.PROTOCOL), 1)
        v.store(reply, 2, failure.get(), 1)
        v.store(reply, 3, T.int32(len(index)), 1)
        _emit_write(reply)
        v.store(reply, 3, T.int32(0), 1)
        with T.While(failure.get() == 0):
            _emit_read(message)
            v.store(reply, 1, message[1], 1)
            _emit_clock(reply, 4)
            failure.set(T.int32(0))
            graph = v.let(message[2])
            is_known = T.And(graph >= 0, graph < len(index))
            with T.If(is_known), T.Then():
                operands = _find_address(message, T.int32(4))
                ffn.call("pi2_run", memory.get(), graph, operands)
            with T.If(T.And(T.Not(is_known), graph != -1)), T.Then():
                failure.set(T.int32(2))
            _emit_clock(reply, 6)
            v.store(reply, 2, failure.get(), 1)
            _emit_write(reply)
        T.evaluate(_call_system(_EXIT, T.int32(0)))


def _emit_read(message: ffn.Buffer) -> None:
    """Read a whole message; the program ends where there is none."""
    done = v.Cell(T.int32(0))
    size = session.MESSAGE.size
    with T.While(done.get() < size):
        place = _find_address(message, T.int32(0)) + done.get()
        count = v.let(_call_system(_READ, T.int32(0), place, size - done.get()))
        with T.If(count <= 0), T.Then():
            T.evaluate(_call_system(_EXIT, T.int32(0)))
        done.set(done.get() + count)


def _emit_write(reply: ffn.Buffer) -> None:
    """Write the reply; short writes do not happen to so few bytes of a pipe."""
    place = _find_address(reply, T.int32(0))
    T.evaluate(_call_system(_WRITE, T.int32(1), place, T.int32(session.REPLY.size)))


def _emit_clock(reply: ffn.Buffer, word: int) -> None:
    place = _find_address(reply, T.int32(word))
    T.evaluate(_call_system(_CLOCK, T.int32(_MONOTONIC), place))


def emit_count(index: Sequence[Graph], address: ffn.Expr) -> None:
    """Write the number of graphs to ``address``."""
    v.store(ffn.view(address, "int32"), 0, T.int32(len(index)), 1)


def emit_run(index: Sequence[Graph], memory: ffn.Expr, graph: ffn.Expr, operands: ffn.Expr) -> None:
    """Run a graph of the index; numbers beyond it do nothing."""
    for number, item in enumerate(index):
        with T.If(graph == number), T.Then():
            ffn.call(item.name, memory, operands)


ENTRY = "_start"


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    parameters: Sequence[str]
    emit: Callable[..., None]

    def make(self) -> tvm.tirx.PrimFunc:
        """Build it; all parameters are int32."""
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name(self.name)
                # Addresses may be of the same memory.
                T.func_attr({"global_symbol": self.name, "tirx.noalias": False})
                self.emit(*(T.arg(parameter, T.int32()) for parameter in self.parameters))
        return builder.get()


def read_program(text: str) -> Program:
    return Program(HexagonSpec.from_json(text))


class Program:
    """Graphs of a model's shapes: a program for the emulator, or an object for the vendor's linker
    (`backends/hexagon/dsp`)."""

    def __init__(self, spec: HexagonSpec) -> None:
        self.spec = spec

    @property
    def target(self) -> tvm.target.Target:
        version = self.spec.version
        options = {"kind": "llvm", "mtriple": "hexagon", "mcpu": f"hexagon{version}"}
        return tvm.target.Target({**options, "mattr": [f"+hvx{version}", "+hvx-length128b"]})

    def list_functions(self) -> Iterator[Function]:
        """Return all functions; the worker's is the last."""
        spec = self.spec
        yield from _list_multiplies(spec)
        yield from _list_ffn(spec.ffn, {count_together(g.tokens) for g in spec.graphs})
        for graph in spec.graphs:
            yield Function(graph.name, _GRAPH, partial(emit_ffn_graph, spec.ffn, graph))
        kinds = {(g.weights, g.length, count_together(g.tokens)) for g in spec.products}
        for weights, length, together in sorted(kinds):
            name = _name_product(weights, length, together)
            emit = partial(ffn.emit_product, weights, length, together)
            yield Function(name, ffn.PRODUCT, emit)
        for product in spec.products:
            yield Function(product.name, _GRAPH, partial(emit_product_graph, product))
        yield Function("pi2_run", _RUN, partial(emit_run, spec.index))
        yield Function("pi2_count", ("address",), partial(emit_count, spec.index))
        yield Function(ENTRY, (), partial(emit_worker, spec.index))

    def write_file(self, output: Path, report: Report) -> None:
        """Compile every function to a file, the worker's last, and link them."""
        functions, files = list(self.list_functions()), []
        with tempfile.TemporaryDirectory() as folder:
            for number, function in enumerate(functions):
                files.append(Path(folder) / f"{function.name}.o")
                module = tvm.IRModule({function.name: function.make()})
                generate_plain(module, self.target).write_to_file(str(files[-1]), "o")
                report(f"compiled {function.name}", (number + 1) / (len(functions) + 1))
            _link(files, output)
        find_signatures(output).write_text(self.spec.write_index())


_GRAPH = ("memory", "operands")
_RUN = ("memory", "graph", "operands")


def _list_multiplies(spec: HexagonSpec) -> Iterator[Function]:
    wanted = {(g.weights, count_together(g.tokens)) for g in spec.products}
    for graph in spec.graphs:
        together = count_together(graph.tokens)
        # Down columns are int8 in any case.
        wanted |= {(spec.ffn.weights, together), ("int8", together)}
    for weights, together in sorted(wanted):
        name = ffn.name_multiply(weights, together)
        if LAYOUTS[weights].has_groups:
            parameters = ["weights", "multipliers", "inputs", "offsets", "pairs", "sums"]
            yield Function(name, parameters, partial(ffn.emit_multiply_int4, together))
        else:
            parameters = ["weights", "inputs", "offsets", "count", "sums"]
            yield Function(name, parameters, partial(ffn.emit_multiply_int8, together))


def _list_ffn(shape: FfnShape, tokens: set[int]) -> Iterator[Function]:
    for together in sorted(tokens):
        yield Function(f"values_{together}", ffn.VALUES, partial(ffn.emit_values, shape, together))
        emit = partial(ffn.emit_requantize, together)
        yield Function(f"requantize_{together}", ffn.REQUANTIZE, emit)
        emit = partial(ffn.emit_sums, shape.hidden, together)
        yield Function(f"sums_{together}", ffn.SUMS, emit)


def _name_product(weights: str, length: int, together: int) -> str:
    return f"product_{weights}_{length}_{together}"


def _read_operands(
    names: Sequence[str], memory: ffn.Expr, operands: ffn.Expr
) -> dict[str, ffn.Expr]:
    words = ffn.view(operands, "int32")
    return {
        name: words[place] if name in NUMBERS else memory + words[place]
        for place, name in enumerate(names)
    }


def emit_ffn_graph(shape: FfnShape, graph: FfnGraph, memory: ffn.Expr, operands: ffn.Expr) -> None:
    """The FFN of ``graph.neurons`` neurons for ``graph.tokens`` tokens."""
    o = _read_operands(FFN_OPERANDS, memory, operands)
    scratch, together = graph.scratch, count_together(graph.tokens)
    tiles, blocks = T.int32(graph.neurons // LANES), T.int32(graph.tokens // together)
    places = {name: o["scratch"] + place for name, place in scratch.places.items()}
    o |= {"tiles": tiles, "blocks": blocks} | places
    ffn.call(f"values_{together}", *(o[name] for name in ffn.VALUES))
    rounded = [places[name] for name in ("rounded", "rounded_offsets", "rounded_scales")]
    ffn.call(f"requantize_{together}", o["values"], T.int32(graph.neurons), blocks, *rounded)
    ffn.call(
        f"sums_{together}",
        o["down"],
        o["down_scales"],
        o["stride"],
        T.int32(shape.hidden // LANES),
        T.int32(graph.neurons // 4),
        blocks,
        *rounded,
        o["results"],
        o["sums"],
    )


def emit_product_graph(graph: ProductGraph, memory: ffn.Expr, operands: ffn.Expr) -> None:
    """``graph.rows`` rows of a matrix times ``graph.tokens`` tokens."""
    o = _read_operands(PRODUCT_OPERANDS, memory, operands)
    together = count_together(graph.tokens)
    o |= {"tiles": T.int32(graph.rows // LANES), "blocks": T.int32(graph.tokens // together)}
    o["sums"] = o["scratch"] + graph.scratch.places["sums"]
    name = _name_product(graph.weights, graph.length, together)
    ffn.call(name, *(o[name] for name in ffn.PRODUCT))


def _link(files: list[Path], output: Path) -> None:
    """Make a program of all ``files``, or one object of all but the worker."""
    linker = find_linker()
    if linker is None:
        raise LinkError(f"{LINKERS[0]}: not installed")
    options = ["-static", "--gc-sections", "-s", "-e", ENTRY]
    if output.suffix == OBJECT:
        options, files = ["-r"], files[:-1]
    command = [linker, *options, "-o", str(output), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{linker}: {done.stderr.strip()}")
