"""The functions of a library: kernels, graphs, and what runs a graph by its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.hexagon.kernels import code as c
from pi2.backends.hexagon.kernels import ffn, products, worker
from pi2.backends.hexagon.operands import (
    FFN_OPERANDS,
    NUMBERS,
    PRODUCT_OPERANDS,
    lay_out_scratch,
)
from pi2.backends.hexagon.specification import (
    LANES,
    FfnGraph,
    FfnShape,
    HexagonSpec,
    ProductGraph,
    count_together,
)

ENTRY = "_start"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a library."""

    name: str
    parameters: Sequence[str]
    emit: Callable[..., None]

    def make(self) -> tvm.tirx.PrimFunc:
        """Return its TensorIR."""
        return c.make_function(self.name, self.parameters, self.emit)


def read_program(text: str) -> Program:
    """Return the program of a spec."""
    return Program(HexagonSpec.from_json(text))


class Program:
    """Graphs of a model's shapes."""

    def __init__(self, spec: HexagonSpec) -> None:
        self.spec = spec

    @property
    def target(self) -> tvm.target.Target:
        """The NPU."""
        return c.make_target(self.spec.version)

    def list_functions(self) -> Iterator[Function]:
        """Return all functions; the worker's is the last."""
        spec = self.spec
        yield from _list_multiplies(spec)
        if spec.ffn is not None:
            yield from _list_ffn(spec.ffn, {count_together(g.tokens) for g in spec.graphs})
        for graph in spec.graphs:
            assert spec.ffn is not None, "graphs of neurons need their shape"
            yield Function(graph.name, _GRAPH, partial(emit_ffn_graph, spec.ffn, graph))
        kinds = {(g.weights, g.length, count_together(g.tokens)) for g in spec.products}
        for weights, length, together in sorted(kinds):
            name = _name_product(weights, length, together)
            emit = partial(ffn.emit_product, weights, length, together)
            yield Function(name, ffn.PRODUCT, emit)
        for product in spec.products:
            yield Function(product.name, _GRAPH, partial(emit_product_graph, product))
        yield Function("pi2_run", _RUN, partial(worker.emit_run, spec.index))
        yield Function("pi2_count", ("address",), partial(worker.emit_count, spec.index))
        yield Function(ENTRY, (), partial(worker.emit_worker, spec.index))


_GRAPH = ("memory", "operands")
_RUN = ("memory", "graph", "operands")


def _list_multiplies(spec: HexagonSpec) -> Iterator[Function]:
    wanted = {(g.weights, count_together(g.tokens)) for g in spec.products}
    for graph in spec.graphs:
        assert spec.ffn is not None, "graphs of neurons need their shape"
        together = count_together(graph.tokens)
        # Down columns are int8 in any case.
        wanted |= {(spec.ffn.weights, together), ("int8", together)}
    for weights, together in sorted(wanted):
        name = ffn.name_multiply(weights, together)
        if weights == "int4":
            parameters = ["weights", "multipliers", "inputs", "offsets", "pairs", "sums"]
            yield Function(name, parameters, partial(products.emit_multiply_int4, together))
        else:
            parameters = ["weights", "inputs", "offsets", "count", "sums"]
            yield Function(name, parameters, partial(products.emit_multiply_int8, together))


def _list_ffn(shape: FfnShape, tokens: set[int]) -> Iterator[Function]:
    for together in sorted(tokens):
        yield Function(f"values_{together}", ffn.VALUES, partial(ffn.emit_values, shape, together))
        emit = partial(ffn.emit_requantize, together)
        yield Function(f"requantize_{together}", ffn.REQUANTIZE, emit)
        emit = partial(ffn.emit_sums, shape.hidden, together)
        yield Function(f"sums_{together}", ffn.SUMS, emit)


def _name_product(weights: str, length: int, together: int) -> str:
    return f"product_{weights}_{length}_{together}"


def _read_operands(names: Sequence[str], memory: c.Expr, operands: c.Expr) -> dict[str, c.Expr]:
    """Operands by name: addresses, but for those that are numbers."""
    words = c.view(operands, "int32")
    return {
        name: words[place] if name in NUMBERS else memory + words[place]
        for place, name in enumerate(names)
    }


def emit_ffn_graph(shape: FfnShape, graph: FfnGraph, memory: c.Expr, operands: c.Expr) -> None:
    """The FFN of ``graph.neurons`` neurons for ``graph.tokens`` tokens."""
    o = _read_operands(FFN_OPERANDS, memory, operands)
    scratch, together = lay_out_scratch(graph), count_together(graph.tokens)
    tiles, blocks = T.int32(graph.neurons // LANES), T.int32(graph.tokens // together)
    places = {name: o["scratch"] + place for name, place in scratch.places.items()}
    o |= {"tiles": tiles, "blocks": blocks} | places
    c.call(f"values_{together}", *(o[name] for name in ffn.VALUES))
    rounded = [places[name] for name in ("rounded", "rounded_offsets", "rounded_scales")]
    c.call(f"requantize_{together}", o["values"], T.int32(graph.neurons), blocks, *rounded)
    c.call(
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


def emit_product_graph(graph: ProductGraph, memory: c.Expr, operands: c.Expr) -> None:
    """``graph.rows`` rows of a matrix times ``graph.tokens`` tokens."""
    o = _read_operands(PRODUCT_OPERANDS, memory, operands)
    together = count_together(graph.tokens)
    o |= {"tiles": T.int32(graph.rows // LANES), "blocks": T.int32(graph.tokens // together)}
    o["sums"] = o["scratch"] + lay_out_scratch(graph).places["sums"]
    name = _name_product(graph.weights, graph.length, together)
    c.call(name, *(o[name] for name in ffn.PRODUCT))
