"""Down vectors of a few neurons, each times its activation, added to y of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.neurons import Bundles, Neuron, activate
from pi2.backends.kernels.operands import Activations, Prefetch, Vector
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.unpacking import Block, find_unpacking
from pi2.backends.kernels.unpacking.unpacking import WIDE
from pi2.plan.weights.layout import GROUP, weight_bytes


def find_neighbour(bundles: Bundles, place: v.Expr, first: v.Expr | None) -> Neuron:
    """Return a neuron of ``bundles`` in stored order; ``first``: row of the first's scales."""
    return bundles.find(place, None if first is None else first + place)


def emit_values(
    isa: Isa,
    activations: Activations,
    bundles: Bundles,
    neurons: list[Neuron],
    token: v.Expr,
    routes: v.Buffer | None,
    prefetch: Prefetch | None = None,
) -> list[v.Expr]:
    """Values of ``neurons`` for ``token``, times the weights of their experts; ``prefetch`` is told
    which inputs are read, and when."""
    names = [part.name for part in bundles.spec.bundle.parts[:-1]]
    parts, vectors = len(names), bundles.take_parts(neurons, names)
    dots = [v.let(row[0]) for row in emit_dots(isa, vectors, activations, [token], prefetch)]
    found = []
    for index, neuron in enumerate(neurons):
        biases = load_biases(bundles, neuron)
        terms = dots[index * parts : (index + 1) * parts]
        found.append(find_value(bundles, neuron, biases, token, terms, routes))
    return found


def find_value(
    bundles: Bundles,
    neuron: Neuron,
    biases: list[v.Expr],
    token: v.Expr,
    terms: list[v.Expr],
    routes: v.Buffer | None,
    cutoffs: v.Buffer | None = None,
) -> v.Expr:
    """Return a neuron's value for a token, of its dot products; ``biases``: what to add to them, if
    anything; ``cutoffs`` float32 [tokens] of gates, if layers have them."""
    if biases:
        terms = [v.let(term + bias) for term, bias in zip(terms, biases, strict=True)]
    weight = None if routes is None else load_route(bundles, neuron, routes, token)
    if weight is not None and bundles.spec.weighs_input:
        terms, weight = [v.let(term * weight) for term in terms], None
    cutoff = None if cutoffs is None else v.let(cutoffs[token])
    value = activate(bundles.spec, terms[0], terms[1] if bundles.spec.ffn.gated else None, cutoff)
    return value if weight is None else value * weight


def load_route(bundles: Bundles, neuron: Neuron, routes: v.Buffer, token: v.Expr) -> v.Expr:
    expert = bundles.load_expert(neuron)
    return v.let(routes[token * bundles.spec.experts + expert])


def load_biases(bundles: Bundles, neuron: Neuron) -> list[v.Expr]:
    """Return the number added to a neuron's dot products; none if the model adds nothing."""
    return [
        v.let(v.load_as(bundles.arena, neuron.base + bias.offset, "float32", 1))
        for bias in bundles.spec.bundle.biases
    ]


def emit_clear(spec: KernelSpec, partial: v.Buffer, thread: v.Expr) -> v.Expr:
    """Set the sum of a thread in ``partial`` float32 [threads, hidden] to 0; return its place."""
    origin = v.let(thread * spec.hidden)
    with T.serial(spec.hidden // 16) as step:
        v.store(partial, origin + step * 16, v.constant(0.0, "float32", 16), 16)
    return origin


def emit_add(spec: KernelSpec, partial: v.Buffer, total: v.Buffer, token: v.Expr) -> None:
    """Add the sums of all threads to ``total`` float32 [tokens, hidden] of ``token``."""
    hidden = spec.hidden
    with T.serial(hidden // 16) as step:
        place = step * 16
        sum_place = token * hidden + place
        value = v.load(total, sum_place, 16)
        for thread in range(spec.threads):
            value = value + v.load(partial, thread * hidden + place, 16)
        v.store(total, sum_place, value, 16)


def emit_add_parts(
    spec: KernelSpec, sums: v.Buffer, parts: v.Expr, total: v.Buffer, token: v.Expr
) -> None:
    """Add the sums of all threads of the first ``parts`` parts, float32 [parts threads, hidden],
    part by part to ``total`` float32 [tokens, hidden] of ``token``."""
    hidden = spec.hidden
    with T.serial(hidden // 16) as step:
        place = step * 16
        sum_place = token * hidden + place
        value = v.Cell(v.load(total, sum_place, 16))
        with T.serial(parts * spec.threads) as own:
            value.set(value.get() + v.load(sums, own * hidden + place, 16))
        v.store(total, sum_place, value.get(), 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Sums of the squares of activations: ``total`` float32 [tokens], and ``own`` float32
    [tokens, threads] of each thread, [threads] where there is one token."""

    total: v.Buffer
    own: v.Buffer

    def set_own(self, place: v.Expr, values: v.Buffer, first: v.Expr, count: v.Expr) -> None:
        """Set a thread's sum to the sum of ``count`` of ``values`` from ``first`` on."""
        v.store(self.own, place, add_squares(values, first, count), 1)

    def emit_add(self, threads: int, token: v.Expr, first: v.Expr | int = 0) -> None:
        """Add the sums of all threads, from place ``first`` on, to the sum of ``token``."""
        value = self.total[token]
        for thread in range(threads):
            value = value + self.own[first + thread]
        v.store(self.total, token, value, 1)


def add_squares(values: v.Buffer, first: v.Expr, count: v.Expr) -> v.Expr:
    """Return the sum of the squares of ``count`` of ``values`` from ``first`` on."""
    total = v.Cell(v.constant(0.0, "float32"))
    with T.serial(count) as step:
        value = v.let(values[first + step])
        total.set(T.fma(value, value, total.get()))
    return v.let(total.get())


def emit_count(spec: KernelSpec, counts: v.Buffer) -> None:
    """Add each thread's count to the last of ``counts`` int32 [threads + 1], never reset."""
    threads = spec.threads
    for thread in range(threads):
        v.store(counts, threads, counts[threads] + counts[thread], 1)


def emit_downs(
    isa: Isa,
    spec: KernelSpec,
    weighed: Sequence[tuple[Vector, v.Expr]],
    target: v.Buffer,
    base: v.Expr,
    once: v.Expr,
    ask: Prefetch | None = None,
) -> None:
    """Add each of some down vectors times its value to ``target[base:]`` (lane order), one after
    the other; ``ask`` is told the reads, and their time. ``once``: see `Activations`."""
    unpacking = find_unpacking(spec.precision.ffn)
    size = weight_bytes(GROUP, spec.precision.ffn)

    def add_rows(
        vectors: Sequence[Sequence[tuple[v.Expr, v.Expr]]], scales: Sequence[v.Expr], lanes: int
    ) -> None:
        """Add, of each of some vectors, registers of weights by their places, times its scale."""
        for rows in zip(*vectors, strict=True):
            at = v.let(base + rows[0][0])
            total = v.load(target, at, lanes)
            for (_, weights), scale in zip(rows, scales, strict=True):
                total = T.fma(weights, scale, total)
            v.store(target, at, total, lanes)

    def emit_block(lanes: int, first: v.Expr) -> None:
        step = unpacking.count_tile_bytes(lanes)
        scales = [
            v.let(unpacking.load_block_scale(Block(vector, lanes, first)) * v.splat(value, lanes))
            for vector, value in weighed
        ]
        for chunk in range(unpacking.tiles):
            tiles = []
            for index, (vector, _) in enumerate(weighed):
                if ask is not None:
                    ask(index, v.wide(first * size) + chunk * step, step)
                tiles.append(unpacking.emit_tile(isa, Block(vector, lanes, first), chunk))
            add_rows(tiles, scales, lanes)

    def emit_narrow(lanes: int, first: v.Expr) -> None:
        blocks = []
        for index, (vector, _) in enumerate(weighed):
            if ask is not None:
                ask(index, v.wide(first * size), lanes * size)
            blocks.append(unpacking.emit_narrow_block(Block(vector, lanes, first)))
        scales = [
            v.let(unpacking.load_wide_scale(Block(vector, lanes, first), value))
            for vector, value in weighed
        ]
        add_rows(blocks, scales, WIDE)

    for lanes, group, tiles in unpacking.list_tiles(spec.hidden):
        groups = unpacking.count_groups(lanes)
        emit_own = emit_narrow if unpacking.can_widen(isa, lanes) else emit_block
        with T.serial(tiles // unpacking.tiles * once) as block:
            emit_own(lanes, group + block * groups)
