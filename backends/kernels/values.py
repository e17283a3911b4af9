"""What neurons are worth for some tokens: their activations, in any FFN.

Of all vectors of a neuron but the last, its biases, and the weight of its expert in a mixture.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.chosen import Chosen
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.i8mm import emit_items, takes_pairs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_token_tiles
from pi2.backends.kernels.neurons import Bundles, Neuron, activate
from pi2.backends.kernels.operands import Activations, Prefetch, Vector
from pi2.backends.kernels.spec import PANEL


def emit_activations(
    isa: Isa,
    activations: Activations,
    bundles: Bundles,
    first: v.Expr | None,
    origin: v.Expr,
    start: v.Expr,
    stop: v.Expr,
    tokens: v.Expr,
    values: v.Buffer,
    routes: v.Buffer | None,
    thread: v.Expr,
    chosen: Chosen,
) -> None:
    """Set ``values`` float32 [tokens, PANEL] of neurons ``start`` to ``stop`` of the panel that
    begins with neuron ``origin``, of those that are ``chosen``.  ``first``: row of resident scales
    that the first of ``bundles`` has."""
    spec = bundles.spec

    def find(neuron: v.Expr) -> Neuron:
        return find_neighbour(bundles, chosen.find_neuron(origin + neuron), first)

    if takes_pairs(isa, spec.ffn):
        parts = len(spec.bundle.parts) - 1

        def take_vectors(neuron: v.Expr) -> list[Vector]:
            return take_inputs(bundles, find(neuron))

        def keep(token: v.Expr, neuron: v.Expr, dots: list[v.Expr]) -> None:
            found = find(neuron)
            biases = _load_biases(bundles, found)
            place = chosen.find_token(token)
            value = _find_value(bundles, found, biases, place, dots, routes)
            v.store(values, token * PANEL + neuron, value, 1)

        emit_items(activations, tokens, thread, start, stop, parts, take_vectors, keep, chosen)
        return
    together = max(1, isa.tile_rows // (len(spec.bundle.parts) - 1))

    def emit_tile(_first: v.Expr, named: list[v.Expr]) -> None:
        places = [chosen.find_token(token) for token in named]
        with T.serial(T.floordiv(stop - start + together - 1, together)) as step:
            top = v.let(start + step * together)
            # A repeated token or neuron writes the same value again.
            neurons = [v.let(T.min(top + index, stop - 1)) for index in range(together)]
            wanted = [find(neuron) for neuron in neurons]
            found = emit_values(isa, activations, bundles, wanted, places, routes)
            for neuron, row in zip(neurons, found, strict=True):
                for token, value in zip(named, row, strict=True):
                    v.store(values, token * PANEL + neuron, value, 1)

    emit_token_tiles(isa, activations.used_planes, tokens, emit_tile)


def find_neighbour(bundles: Bundles, place: v.Expr, first: v.Expr | None) -> Neuron:
    """Return a neuron of ``bundles`` that lie in stored order; the first has row ``first`` of
    resident scales."""
    return bundles.find(place, None if first is None else first + place)


def emit_values(
    isa: Isa,
    activations: Activations,
    bundles: Bundles,
    neurons: list[Neuron],
    tokens: list[v.Expr],
    routes: v.Buffer | None,
    prefetch: Prefetch | None = None,
) -> list[list[v.Expr]]:
    """Values of ``neurons`` for ``tokens``, times the weights of their experts; ``prefetch`` is
    told what is read of their inputs, and when."""
    parts = len(bundles.spec.bundle.parts) - 1
    vectors = [vector for neuron in neurons for vector in take_inputs(bundles, neuron)]
    dots = emit_dots(isa, vectors, activations, tokens, prefetch)
    found = []
    for index, neuron in enumerate(neurons):
        rows = dots[index * parts : (index + 1) * parts]
        biases = _load_biases(bundles, neuron)
        row = []
        for turn, token in enumerate(tokens):
            terms = [v.let(part[turn]) for part in rows]
            row.append(_find_value(bundles, neuron, biases, token, terms, routes))
        found.append(row)
    return found


def take_inputs(bundles: Bundles, neuron: Neuron) -> list[Vector]:
    """Return all vectors of a neuron but the last."""
    return [bundles.take_part(neuron, part.name) for part in bundles.spec.bundle.parts[:-1]]


def _find_value(
    bundles: Bundles,
    neuron: Neuron,
    biases: list[v.Expr],
    token: v.Expr,
    terms: list[v.Expr],
    routes: v.Buffer | None,
) -> v.Expr:
    """Return a neuron's value for a token, of its dot products."""
    if biases:
        terms = [v.let(term + bias) for term, bias in zip(terms, biases, strict=True)]
    value = activate(bundles.spec, terms[0], terms[1] if bundles.spec.gated else None)
    if routes is not None:
        value = value * load_route(bundles, neuron, routes, token)
    return value


def load_route(bundles: Bundles, neuron: Neuron, routes: v.Buffer, token: v.Expr) -> v.Expr:
    """Weight of the expert of a neuron for a token."""
    expert = bundles.load_expert(neuron)
    return v.let(routes[token * bundles.spec.experts + expert])


def _load_biases(bundles: Bundles, neuron: Neuron) -> list[v.Expr]:
    return [
        v.let(v.load_as(bundles.arena, neuron.base + bias.offset, "float32", 1))
        for bias in bundles.spec.bundle.biases
    ]
