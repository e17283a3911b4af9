"""Activations of a panel of contiguous neurons, for a chunk of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.amx import emit_block_items, has_many, takes_blocks
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.i8mm import emit_items, takes_pairs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_token_tiles
from pi2.backends.kernels.neurons import (
    Bundles,
    Neuron,
    find_neighbour,
    find_value,
    is_firing,
    load_biases,
)
from pi2.backends.kernels.operands import Activations, Chosen, Items, Vector
from pi2.backends.kernels.spec import PANEL, KernelSpec
from pi2.formats import find_packing
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


Keep = Callable[[v.Expr, v.Expr, Neuron, list[v.Expr]], None]
"""Called with (token, number in the panel, neuron, its dot products) to store the result."""


def emit_activations(isa: Isa, activations: Activations, panel: Panel, share: Share) -> None:
    """Set the panel's values of neurons of a share for all tokens."""

    def keep(token: v.Expr, number: v.Expr, neuron: Neuron, dots: list[v.Expr]) -> None:
        place = panel.chosen.find_token(token)
        biases = load_biases(panel.bundles, neuron)
        found = (panel.bundles, neuron, biases, place, dots, panel.routes, panel.cutoffs)
        value = find_value(*found)
        panel.store(token, number, value)

    names = [part.name for part in panel.bundles.spec.bundle.parts[:-1]]
    _emit_products(isa, activations, panel, names, share, keep)


def emit_gates(isa: Isa, activations: Activations, panel: Panel, share: Share) -> None:
    """Set the panel's values of neurons of a share to their gates, for all tokens."""

    def keep(token: v.Expr, number: v.Expr, neuron: Neuron, dots: list[v.Expr]) -> None:
        biases = load_biases(panel.bundles, neuron)
        panel.store(token, number, dots[0] + biases[0] if biases else dots[0])

    _emit_products(isa, activations, panel, ["gate"], share, keep)


def _emit_products(
    isa: Isa,
    activations: Activations,
    panel: Panel,
    names: Sequence[PartName],
    share: Share,
    keep: Keep,
) -> None:
    spec, parts = panel.bundles.spec, len(names)

    def take_vectors(number: v.Expr) -> list[Vector]:
        return panel.bundles.take_parts([panel.find(number)], names)

    def finish(token: v.Expr, number: v.Expr, dots: list[v.Expr]) -> None:
        keep(token, number, panel.find(number), dots)

    items = Items(
        begin=share.start, end=share.stop, parts=parts, take_vectors=take_vectors, finish=finish
    )
    given = (activations, share.tokens, share.thread, items)
    if takes_pairs(isa, spec.precision.gates):
        emit_items(*given, panel.chosen)
        return
    if takes_blocks(isa, activations, spec.precision.gates):
        with T.If(has_many(activations, share.tokens)):
            with T.Then():
                emit_block_items(*given)
            with T.Else():
                _emit_tiled_products(isa, activations, panel, names, share, keep)
        return
    _emit_tiled_products(isa, activations, panel, names, share, keep)


def _emit_tiled_products(
    isa: Isa,
    activations: Activations,
    panel: Panel,
    names: Sequence[PartName],
    share: Share,
    keep: Keep,
) -> None:
    """Multiply parts of neurons with all tokens, a few of both at a time."""
    parts = len(names)
    of_values = find_packing(panel.bundles.spec.precision.gates).meets_values
    isa = isa.shape_tile(activations.used_planes, of_values=of_values)
    together, size = max(1, isa.tile_rows // parts), VECTOR_TILE // parts

    def emit_tile(first: v.Expr, last: v.Expr, named: list[v.Expr]) -> None:
        places = [panel.chosen.find_token(token) for token in named]
        with T.serial(T.floordiv(last - first + together, together)) as step:
            top = v.let(first + step * together)
            # A repeated token or neuron writes the same value again.
            numbers = [v.let(T.min(top + index, last)) for index in range(together)]
            neurons = [panel.find(number) for number in numbers]
            vectors = panel.bundles.take_parts(neurons, names)
            dots = emit_dots(isa, vectors, activations, places)
            for index, (number, neuron) in enumerate(zip(numbers, neurons, strict=True)):
                own = dots[index * parts : (index + 1) * parts]
                for turn, token in enumerate(named):
                    keep(token, number, neuron, [v.let(row[turn]) for row in own])

    with T.serial(T.floordiv(share.stop - share.start + size - 1, size)) as tile:
        first = v.let(share.start + tile * size)
        last = v.let(T.min(first + size, share.stop) - 1)

        def emit(
            _: v.Expr, named: list[v.Expr], first: v.Expr = first, last: v.Expr = last
        ) -> None:
            emit_tile(first, last, named)

        emit_token_tiles(isa, activations.used_planes, share.tokens, emit)


@dataclass(frozen=True, slots=True)
class Opened:
    """Neurons of a panel whose gates are open: int16 ``numbers``, ascending, counted from the
    panel's neuron ``start``."""

    numbers: v.Buffer
    count: v.Expr
    start: v.Expr

    def read(self, place: v.Expr) -> v.Expr:
        return v.let(self.start + v.cast(self.numbers[place], "int32", 1))


def count_sharing(isa: Isa, spec: KernelSpec) -> int:
    """Return how many tokens have their open gates in one list."""
    return 2 if takes_pairs(isa, spec.precision.gates) else 1


def emit_open_values(
    isa: Isa, activations: Activations, panel: Panel, share: Share, token: v.Expr
) -> Opened:
    """Replace gates, which `emit_gates` has left, by activations, for the share's tokens, from
    ``token`` on (`count_sharing` at most): of those neurons whose gates are open for any of them;
    return which these are."""
    spec, start, tokens = panel.bundles.spec, share.start, share.tokens
    rows = [v.let(token * PANEL + start)]
    if count_sharing(isa, spec) > 1:
        rows.append(v.let((token + tokens - 1) * PANEL + start))
    numbers = T.alloc_buffer((PANEL,), "int16")

    def test(number: v.Expr, lanes: int) -> v.Expr:
        opens = [is_firing(spec, v.load(panel.values, row + number, lanes), lanes) for row in rows]
        return opens[0] if len(opens) == 1 else T.Or(*opens)

    opened = Opened(numbers, emit_list(isa, v.let(share.stop - start), test, numbers), start)
    if takes_pairs(isa, spec.precision.gates):
        _emit_paired_ups(activations, panel, opened, token, tokens, share.thread)
    else:
        _emit_listed_ups(isa, activations, panel, opened, token)
    return opened


def _emit_listed_ups(
    isa: Isa, activations: Activations, panel: Panel, opened: Opened, token: v.Expr
) -> None:
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


def _emit_paired_ups(
    activations: Activations,
    panel: Panel,
    opened: Opened,
    token: v.Expr,
    tokens: v.Expr,
    thread: v.Expr,
) -> None:
    """Make activations of the open gates of two tokens that are multiplied together, or of one."""
    chosen = panel.chosen.count_from(token)

    def take_vectors(place: v.Expr) -> list[Vector]:
        return panel.bundles.take_parts([panel.find(opened.read(place))], ["up"])

    def keep(turn: v.Expr, place: v.Expr, dots: list[v.Expr]) -> None:
        number = opened.read(place)
        gate = panel.load(token + turn, number)
        value = _find_open_value(panel, panel.find(number), chosen.find_token(turn), gate, dots[0])
        panel.store(token + turn, number, value)

    items = Items(begin=T.int32(0), end=opened.count, take_vectors=take_vectors, finish=keep)
    emit_items(activations, tokens, thread, items, chosen, is_pair=True)


def _find_open_value(
    panel: Panel, neuron: Neuron, place: v.Expr, gate: v.Expr, up: v.Expr
) -> v.Expr:
    """Return the activation of a neuron for the token at ``place`` of the chunk."""
    biases = load_biases(panel.bundles, neuron)
    terms = [v.let(gate), v.let(up + biases[1]) if biases else up]
    return v.let(find_value(panel.bundles, neuron, [], place, terms, panel.routes))
