"""FFNs whose neurons have biases or no gate: down(act(up x + bias)).

One pass over a neuron: its value from all vectors but the last, then the last one, unless the value
is zero.  Bundles as `pi2.plan.weights.layout` says; biases are float32 in the bundle."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.gathered import Gathered
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_shared, emit_split
from pi2.backends.kernels.neurons import (
    Bundles,
    Neuron,
    Squares,
    emit_add,
    emit_clear,
    emit_count,
    emit_downs,
    emit_values,
    load_route,
)
from pi2.backends.kernels.operands import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What a call adds to, of ``token``."""

    counts: v.Buffer
    """int32 [threads + 1]: the last one counts non-zero activations, ever."""
    total: v.Buffer
    """float32 [hidden] (lane order)."""
    routes: v.Buffer | None
    """float32 [experts]: weights of an MoE model's experts, None without."""
    token: v.Expr
    squares: Squares | None = None
    """Of activations, if they are normalised."""


def emit_plain_gathered(
    isa: Isa,
    activations: Activations,
    bundles: Bundles,
    gathered: Gathered,
    partial: v.Buffer,
    sums: Sums,
) -> None:
    """Add gathered neurons to the total.

    ``partial`` float32 [threads, hidden] one sum per thread, added up in the order of threads. Only
    its place in the list decides which thread computes a neuron: equal input gives equal bits."""
    spec, count, squares, token = bundles.spec, gathered.count, sums.squares, sums.token
    threads, zero = spec.threads, T.int32(0)

    def emit_thread(thread: v.Expr) -> None:
        origin = emit_clear(spec, partial, thread)
        begin, end = emit_split(thread, threads, count)
        fired, square_sum = v.Cell(zero), v.Cell(v.constant(0.0, "float32"))
        with T.serial(end - begin) as step:
            place = begin + step
            neuron = gathered.find(bundles, place)

            def emit_neuron(neuron: Neuron = neuron) -> None:
                found = emit_values(isa, activations, bundles, [neuron], token, sums.routes)
                value = v.let(found[0])
                with T.If(value != v.constant(0.0, "float32")), T.Then():
                    fired.set(fired.get() + 1)
                    if squares is not None:
                        square_sum.set(T.fma(value, value, square_sum.get()))
                    vector = bundles.take_part(neuron, "down")
                    emit_downs(isa, spec, [(vector, value)], partial, origin, activations.once)

            if sums.routes is None:
                emit_neuron()
            else:
                # Of experts that rest nothing but the number is read.
                weight = load_route(bundles, neuron, sums.routes, token)
                with T.If(weight != v.constant(0.0, "float32")), T.Then():
                    emit_neuron()
        v.store(sums.counts, thread, fired.get(), 1)
        if squares is not None:
            v.store(squares.own, thread, square_sum.get(), 1)

    emit_shared(threads, v.wide(count) * spec.bundle.neuron_bytes, emit_thread)
    emit_add(spec, partial, sums.total, token)
    if squares is not None:
        squares.emit_add(threads, token)
    emit_count(spec, sums.counts)
