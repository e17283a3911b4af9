"""What neurons are worth for some tokens: their activations, in any FFN.

Of all vectors of a neuron but the last, its biases, and the weight of its expert in a mixture.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.chosen import Chosen
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.i8mm import emit_items, takes_pairs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_token_tiles
from pi2.backends.kernels.neurons import activate, take_part
from pi2.backends.kernels.operands import Activations, Vector
from pi2.backends.kernels.spec import PANEL, KernelSpec


def emit_activations(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    bundles: v.Buffer,
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
    begins with neuron ``origin``, of those that are ``chosen``."""

    def find_base(neuron: v.Expr) -> v.Expr:
        return v.let(v.wide(chosen.find_neuron(origin + neuron)) * spec.stride)

    if takes_pairs(isa, spec.ffn):
        parts = len(spec.bundle.parts) - 1

        def take_vectors(neuron: v.Expr) -> list[Vector]:
            return _take_vectors(spec, bundles, find_base(neuron))

        def keep(token: v.Expr, neuron: v.Expr, dots: list[v.Expr]) -> None:
            base = find_base(neuron)
            biases = _load_biases(spec, bundles, base)
            place = chosen.find_token(token)
            value = _find_value(spec, bundles, base, biases, place, dots, routes)
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
            bases = [find_base(neuron) for neuron in neurons]
            found = emit_values(isa, spec, activations, bundles, bases, places, routes)
            for neuron, row in zip(neurons, found, strict=True):
                for token, value in zip(named, row, strict=True):
                    v.store(values, token * PANEL + neuron, value, 1)

    emit_token_tiles(isa, activations.planes, tokens, emit_tile)


def emit_values(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    arena: v.Buffer,
    bases: list[v.Expr],
    tokens: list[v.Expr],
    routes: v.Buffer | None,
) -> list[list[v.Expr]]:
    """Values of the neurons at ``bases`` for ``tokens``, times the weights of their experts."""
    parts = len(spec.bundle.parts) - 1
    vectors = [vector for base in bases for vector in _take_vectors(spec, arena, base)]
    dots = emit_dots(isa, vectors, activations, tokens)
    found = []
    for index, base in enumerate(bases):
        rows = dots[index * parts : (index + 1) * parts]
        biases = _load_biases(spec, arena, base)
        row = []
        for turn, token in enumerate(tokens):
            terms = [v.let(part[turn]) for part in rows]
            row.append(_find_value(spec, arena, base, biases, token, terms, routes))
        found.append(row)
    return found


def _take_vectors(spec: KernelSpec, arena: v.Buffer, base: v.Expr) -> list[Vector]:
    """Return all vectors of a neuron but the last."""
    return [take_part(spec, arena, base, part.name) for part in spec.bundle.parts[:-1]]


def _find_value(
    spec: KernelSpec,
    arena: v.Buffer,
    base: v.Expr,
    biases: list[v.Expr],
    token: v.Expr,
    terms: list[v.Expr],
    routes: v.Buffer | None,
) -> v.Expr:
    """Return a neuron's value for a token, of its dot products."""
    if biases:
        terms = [v.let(term + bias) for term, bias in zip(terms, biases, strict=True)]
    value = activate(spec, terms[0], terms[1] if spec.gated else None)
    if routes is not None:
        value = value * load_route(spec, arena, base, routes, token)
    return value


def load_route(
    spec: KernelSpec, arena: v.Buffer, base: v.Expr, routes: v.Buffer, token: v.Expr
) -> v.Expr:
    """Weight of the expert of the neuron at ``base`` for a token."""
    assert spec.bundle.expert_offset is not None
    expert = v.load_as(arena, base + spec.bundle.expert_offset, "int32", 1)
    return v.let(routes[token * spec.experts + expert])


def _load_biases(spec: KernelSpec, arena: v.Buffer, base: v.Expr) -> list[v.Expr]:
    return [
        v.let(v.load_as(arena, base + bias.offset, "float32", 1)) for bias in spec.bundle.biases
    ]
