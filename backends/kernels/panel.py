"""Activations of a panel of contiguous neurons, for a chunk of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.amx import emit_block_items, has_many, takes_blocks
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import Items, emit_items
from pi2.backends.kernels.neurons import (
    Bundles,
    Neuron,
    add_biases,
    find_neighbour,
    find_value,
    is_firing,
)
from pi2.backends.kernels.operands import Activations, Chosen
from pi2.backends.kernels.spec import PANEL
from pi2.plan.weights.layout import PartName


def emit_list(
    isa: Isa,
    count: v.Expr,
    test: Callable[[v.Expr, int], v.Expr],
    places: v.Buffer,
    row: v.Expr | int = 0,
) -> v.Expr:
    """Write the passing places below ``count`` to ``places`` (integers, from ``row`` on, with room
    for ``count`` of them, rounded up to 16); return their number.

    ``test(first, lanes)`` returns whether the places from ``first`` on pass; its results for places
    beyond ``count`` do not matter. Without branches: later places overwrite failing ones."""
    end = v.Cell(T.int32(0))
    # An instruction that moves the lanes that pass together takes 16 at a time.
    lanes = 16 if isa.lanes == 16 else 1
    with T.serial(T.floordiv(count + lanes - 1, lanes)) as step:
        first = v.let(step * lanes)
        passes = test(first, lanes)
        place, one, none = first, T.int32(1), T.int32(0)
        if lanes > 1:
            place = v.let(T.ramp(first, 1, lanes))
            passes = T.And(passes, place < v.splat(count, lanes))
            one, none = (v.constant(number, "int32", lanes) for number in (1, 0))
            place = v.compress(place, passes, lanes)
        v.store(places, row + end.get(), v.cast(place, places.dtype, lanes), lanes)
        end.set(end.get() + v.add_lanes(T.Select(passes, one, none), "int32", lanes))
    return v.let(end.get())


VECTOR_TILE = 128
"""Vectors that a thread takes through all tokens of a chunk: they stay in the second-level cache,
while the tokens' activations pass by."""
LISTED = 4
"""Listed neurons that are multiplied together with one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Neurons of a call: the ``chosen`` ones of ``bundles``, from ``origin`` on."""

    bundles: Bundles
    first: v.Expr | None
    """Row of resident scales that the first of ``bundles`` has."""
    origin: v.Expr
    size: v.Expr
    """Neurons, `PANEL` at most."""
    chosen: Chosen
    values: v.Buffer
    """float32 [tokens, PANEL]: gates, then activations."""
    routes: v.Buffer | None
    """float32 [tokens, experts] weights of an MoE model's experts."""
    cutoffs: v.Buffer | None
    """float32 [tokens] cutoffs of gates, if layers have them."""

    def find(self, number: v.Expr) -> Neuron:
        """Return neuron ``number`` of the panel."""
        place = self.chosen.find_neuron(self.origin + number)
        return find_neighbour(self.bundles, place, self.first)

    def load(self, token: v.Expr, number: v.Expr) -> v.Expr:
        return self.values[token * PANEL + number]

    def store(self, token: v.Expr, number: v.Expr, value: v.Expr) -> None:
        v.store(self.values, token * PANEL + number, value, 1)


@dataclass(frozen=True, slots=True)
class Share:
    """A thread's neurons of a panel, ``start`` to ``stop``, and how many tokens it takes."""

    start: v.Expr
    stop: v.Expr
    tokens: v.Expr
    thread: v.Expr


def emit_activations(isa: Isa, activations: Activations, panel: Panel, share: Share) -> None:
    """Set the panel's values of neurons of a share for all tokens."""

    def find(place: v.Expr, neuron: Neuron, dots: list[v.Expr]) -> v.Expr:
        terms = add_biases(panel.bundles, neuron, dots)
        return find_value(panel.bundles, neuron, place, terms, panel.routes, panel.cutoffs)

    names = [part.name for part in panel.bundles.spec.bundle.parts[:-1]]
    _emit_products(isa, activations, panel, names, share, find)


def emit_gates(isa: Isa, activations: Activations, panel: Panel, share: Share) -> None:
    """Set the panel's values of neurons of a share to their gates, for all tokens."""

    def find(_place: v.Expr, neuron: Neuron, dots: list[v.Expr]) -> v.Expr:
        return add_biases(panel.bundles, neuron, dots)[0]

    _emit_products(isa, activations, panel, ["gate"], share, find)


def _emit_products(
    isa: Isa,
    activations: Activations,
    panel: Panel,
    names: Sequence[PartName],
    share: Share,
    find: Callable[[v.Expr, Neuron, list[v.Expr]], v.Expr],
) -> None:
    """Keep what ``find`` makes of a token's place, a neuron, and the products of its parts."""

    def finish(token: v.Expr, number: v.Expr, dots: list[v.Expr]) -> None:
        panel.store(token, number, find(panel.chosen.find_token(token), panel.find(number), dots))

    parts, of_values = len(names), panel.bundles.spec.packing.meets_values
    items = Items(
        begin=share.start,
        end=share.stop,
        parts=parts,
        most=VECTOR_TILE // parts,
        take_vectors=lambda number: panel.bundles.take_parts([panel.find(number)], names),
        finish=finish,
        find_token=panel.chosen.find_token,
    )
    tile = _shape_tile(isa, activations.used_planes, of_values=of_values)
    if not takes_blocks(isa, activations, panel.bundles.spec.precision.gates):
        emit_items(tile, activations, share.tokens, items)
        return
    with T.If(has_many(activations, share.tokens)):
        with T.Then():
            emit_block_items(activations, share.tokens, share.thread, items)
        with T.Else():
            emit_items(tile, activations, share.tokens, items)


def _shape_tile(isa: Isa, planes: int, *, of_values: bool) -> Isa:
    """Return the schedule for tokens of a chunk in ``planes``: with one, which leaves registers for
    the sums of twice as many tokens, half as many rows are quicker with VNNI.

    ``of_values``: weights meet values that are not rounded. Unpacking them takes longest: six
    tokens share it, whose sums fill 24 of 32 registers."""
    if of_values and isa.lanes == 16:
        return replace(isa, tile_rows=2, tile_tokens=3 if planes == 1 else 6)
    if isa.dot != "vnni" or planes != 1:
        return isa
    return replace(isa, tile_rows=isa.tile_rows // 2)


@dataclass(frozen=True, slots=True)
class Opened:
    """Neurons of a panel whose gates are open: int16 ``numbers``, ascending, counted from the
    panel's neuron ``start``."""

    numbers: v.Buffer
    count: v.Expr
    start: v.Expr

    def read(self, place: v.Expr) -> v.Expr:
        return v.let(self.start + v.cast(self.numbers[place], "int32", 1))


def emit_open_values(
    isa: Isa, activations: Activations, panel: Panel, token: v.Expr, start: v.Expr, stop: v.Expr
) -> Opened:
    """Replace gates, which `emit_gates` has left, by activations: a token's, of those of neurons
    ``start`` to ``stop`` whose gates are open; return which these are."""
    spec, row = panel.bundles.spec, v.let(token * PANEL + start)
    numbers = T.alloc_buffer((PANEL,), "int16")

    def test(number: v.Expr, lanes: int) -> v.Expr:
        return is_firing(spec, v.load(panel.values, row + number, lanes), lanes)

    opened = Opened(numbers, emit_list(isa, v.let(stop - start), test, numbers), start)
    place = v.let(panel.chosen.find_token(token))
    with T.serial(T.floordiv(opened.count + LISTED - 1, LISTED)) as step:
        top = v.let(step * LISTED)
        # A repeated neuron writes the same value again: all gates are read before.
        own = [opened.read(T.min(top + index, opened.count - 1)) for index in range(LISTED)]
        gates = [panel.load(token, number) for number in own]
        neurons = [panel.find(number) for number in own]
        vectors = panel.bundles.take_parts(neurons, ["up"])
        ups = emit_dots(isa, vectors, activations, [place])
        values = [
            _find_open_value(panel, neuron, place, gate, up[0])
            for neuron, gate, up in zip(neurons, gates, ups, strict=True)
        ]
        for number, value in zip(own, values, strict=True):
            panel.store(token, number, value)
    return opened


def _find_open_value(
    panel: Panel, neuron: Neuron, place: v.Expr, gate: v.Expr, up: v.Expr
) -> v.Expr:
    """Return the activation of a neuron for the token at ``place`` of the chunk."""
    terms = [v.let(gate), *add_biases(panel.bundles, neuron, [up], 1)]
    return v.let(find_value(panel.bundles, neuron, place, terms, panel.routes))
