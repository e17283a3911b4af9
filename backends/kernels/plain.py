"""FFNs whose neurons have biases or no gate: down(act(up x + bias)).

One pass over a neuron: its value from all vectors but the last, then the last one, where the value
is not zero.  Bundles as `pi2.plan.layout` says; biases are float32 in the bundle.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.dots import Activations, Vector, emit_dots
from pi2.backends.kernels.i8mm import emit_items, takes_pairs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_shared, emit_split, emit_token_tiles
from pi2.backends.kernels.neurons import (
    activate,
    emit_unit,
    list_units,
    load_unit_scale,
    take_part,
)
from pi2.backends.kernels.spec import PANEL, KernelSpec


def emit_plain_gathered(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    arena: v.Buffer,
    slots: v.Buffer,
    count: v.Expr,
    partial: v.Buffer,
    counts: v.Buffer,
    total: v.Buffer,
    routes: v.Buffer | None,
) -> None:
    """Add ``count`` neurons of ``arena`` uint8 [., stride] to ``total`` (y of one token).

    ``slots`` int32 [count]; ``partial`` float32 [threads, hidden] one sum per thread, added up in
    the order of threads; ``counts`` int32 [threads + 1]: the last one counts non-zero activations,
    ever; ``routes`` float32 [experts]: weights of a mixture's experts, None without.  Which thread
    computes a neuron depends on its place in ``slots`` alone: equal input gives equal bits.
    """
    threads, hidden, zero = spec.threads, spec.hidden, T.int32(0)

    def emit_thread(thread: v.Expr) -> None:
        origin = v.let(thread * hidden)
        with T.serial(hidden // 16) as step:
            v.store(partial, origin + step * 16, v.constant(0.0, "float32", 16), 16)
        begin, end = emit_split(thread, threads, count)
        fired = v.Cell(zero)
        with T.serial(end - begin) as step:
            base = v.let(v.wide(slots[begin + step]) * spec.stride)

            def emit_neuron(base: v.Expr = base) -> None:
                found = _emit_values(isa, spec, activations, arena, [base], [zero], routes)
                value = v.let(found[0][0])
                with T.If(value != v.constant(0.0, "float32")), T.Then():
                    fired.set(fired.get() + 1)
                    vector = take_part(spec, arena, base, "down")
                    _emit_down(isa, spec, vector, value, partial, origin, activations.once)

            if routes is None:
                emit_neuron()
            else:
                # Of experts that rest nothing but the number is read.
                weight = _load_route(spec, arena, base, routes, zero)
                with T.If(weight != v.constant(0.0, "float32")), T.Then():
                    emit_neuron()
        v.store(counts, thread, fired.get(), 1)

    emit_shared(threads, v.wide(count) * spec.bundle.used_bytes, emit_thread)
    with T.serial(hidden // 16) as step:
        place = step * 16
        value = v.load(total, place, 16)
        for thread in range(threads):
            value = value + v.load(partial, thread * hidden + place, 16)
        v.store(total, place, value, 16)
    for thread in range(threads):
        v.store(counts, threads, counts[threads] + counts[thread], 1)


def emit_plain_activations(
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
) -> None:
    """Set ``values`` float32 [tokens, PANEL] of neurons ``start`` to ``stop`` of the panel that
    begins with neuron ``origin``."""
    if takes_pairs(isa, spec.ffn):
        parts = len(spec.bundle.parts) - 1

        def take_vectors(neuron: v.Expr) -> list[Vector]:
            return _take_vectors(spec, bundles, v.let(v.wide(origin + neuron) * spec.stride))

        def keep(token: v.Expr, neuron: v.Expr, dots: list[v.Expr]) -> None:
            base = v.let(v.wide(origin + neuron) * spec.stride)
            biases = _load_biases(spec, bundles, base)
            value = _find_value(spec, bundles, base, biases, token, dots, routes)
            v.store(values, token * PANEL + neuron, value, 1)

        emit_items(activations, tokens, thread, start, stop, parts, take_vectors, keep)
        return
    together = max(1, isa.tile_rows // (len(spec.bundle.parts) - 1))

    def emit_tile(_first: v.Expr, named: list[v.Expr]) -> None:
        with T.serial(T.floordiv(stop - start + together - 1, together)) as step:
            top = v.let(start + step * together)
            # A repeated token or neuron writes the same value again.
            neurons = [v.let(T.min(top + index, stop - 1)) for index in range(together)]
            bases = [v.let(v.wide(origin + neuron) * spec.stride) for neuron in neurons]
            found = _emit_values(isa, spec, activations, bundles, bases, named, routes)
            for neuron, row in zip(neurons, found, strict=True):
                for token, value in zip(named, row, strict=True):
                    v.store(values, token * PANEL + neuron, value, 1)

    emit_token_tiles(isa, activations.planes, tokens, emit_tile)


def _emit_values(
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
        value = value * _load_route(spec, arena, base, routes, token)
    return value


def _load_route(
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


def _emit_down(
    isa: Isa,
    spec: KernelSpec,
    vector: Vector,
    value: v.Expr,
    target: v.Buffer,
    base: v.Expr,
    once: v.Expr,
) -> None:
    """Add ``value`` times the down vector to ``target[base:]`` (lane order)."""
    per_block = {"int4": 4, "int8": 8, "fp16": 1}[spec.ffn]
    for lanes, group, units in list_units(spec.hidden, spec.ffn):
        groups = 1 if spec.ffn == "fp16" else lanes
        with T.serial(units // per_block * once) as block:
            first = v.let(group + block * groups)
            scale = v.let(load_unit_scale(vector, lanes, first) * v.splat(value, lanes))
            for chunk in range(per_block):
                for place, weights in emit_unit(isa, vector, lanes, first, chunk):
                    at = base + place
                    v.store(target, at, T.fma(weights, scale, v.load(target, at, lanes)), lanes)
