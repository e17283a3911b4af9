"""What neurons are worth for some tokens: their activations, in any FFN.

Of all vectors of a neuron but the last, its biases, and the weight of its expert in a mixture.
"""

from __future__ import annotations

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.neurons import Bundles, Neuron, activate
from pi2.backends.kernels.operands import Activations, Prefetch


def find_neighbour(bundles: Bundles, place: v.Expr, first: v.Expr | None) -> Neuron:
    """Return a neuron of ``bundles`` that lie in stored order; the first has row ``first`` of
    resident scales."""
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
    what is read of their inputs, and when."""
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
    anything; ``cutoffs`` float32 [tokens] of gates, where layers have them."""
    if biases:
        terms = [v.let(term + bias) for term, bias in zip(terms, biases, strict=True)]
    weight = None if routes is None else load_route(bundles, neuron, routes, token)
    if weight is not None and bundles.spec.weighs_input:
        terms, weight = [v.let(term * weight) for term in terms], None
    cutoff = None if cutoffs is None else v.let(cutoffs[token])
    value = activate(bundles.spec, terms[0], terms[1] if bundles.spec.gated else None, cutoff)
    return value if weight is None else value * weight


def load_route(bundles: Bundles, neuron: Neuron, routes: v.Buffer, token: v.Expr) -> v.Expr:
    """Weight of the expert of a neuron for a token."""
    expert = bundles.load_expert(neuron)
    return v.let(routes[token * bundles.spec.experts + expert])


def load_biases(bundles: Bundles, neuron: Neuron) -> list[v.Expr]:
    """Return what is added to the dot products of a neuron; none where the model adds nothing."""
    return [
        v.let(v.load_as(bundles.arena, neuron.base + bias.offset, "float32", 1))
        for bias in bundles.spec.bundle.biases
    ]
