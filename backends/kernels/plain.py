"""FFNs whose neurons have biases or no gate: down(act(up x + bias)).

One pass over a neuron: its value from all vectors but the last, then the last one, where the value
is not zero.  Bundles as `pi2.plan.weights.layout` says; biases are float32 in the bundle.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.downs import emit_downs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_shared, emit_split
from pi2.backends.kernels.neurons import Bundles, Neuron
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.thread_sums import Squares, emit_add, emit_clear, emit_count
from pi2.backends.kernels.values import emit_values, load_route


def emit_plain_gathered(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    bundles: Bundles,
    slots: v.Buffer,
    rows: v.Buffer | None,
    count: v.Expr,
    partial: v.Buffer,
    counts: v.Buffer,
    total: v.Buffer,
    routes: v.Buffer | None,
    token: v.Expr,
    squares: Squares | None = None,
) -> None:
    """Add ``count`` neurons of ``bundles`` to ``total`` (y) of ``token``.

    ``slots`` int32 [count], ``rows`` int32 [count] of resident scales; ``partial`` float32
    [threads, hidden] one sum per thread, added up in the order of threads; ``counts`` int32
    [threads + 1]: the last one counts non-zero activations, ever; ``routes`` float32 [experts]:
    weights of a mixture's experts, None without; ``squares`` of activations, where they are
    normalised.  Which thread computes a neuron depends on its
    place in ``slots`` alone: equal input gives equal bits.
    """
    threads, zero = spec.threads, T.int32(0)

    def emit_thread(thread: v.Expr) -> None:
        origin = emit_clear(spec, partial, thread)
        begin, end = emit_split(thread, threads, count)
        fired, square_sum = v.Cell(zero), v.Cell(v.constant(0.0, "float32"))
        with T.serial(end - begin) as step:
            place = begin + step
            neuron = bundles.find(slots[place], None if rows is None else rows[place])

            def emit_neuron(neuron: Neuron = neuron) -> None:
                found = emit_values(isa, activations, bundles, [neuron], token, routes)
                value = v.let(found[0])
                with T.If(value != v.constant(0.0, "float32")), T.Then():
                    fired.set(fired.get() + 1)
                    if squares is not None:
                        square_sum.set(T.fma(value, value, square_sum.get()))
                    vector = bundles.take_part(neuron, "down")
                    emit_downs(isa, spec, [vector], [value], partial, origin, activations.once)

            if routes is None:
                emit_neuron()
            else:
                # Of experts that rest nothing but the number is read.
                weight = load_route(bundles, neuron, routes, token)
                with T.If(weight != v.constant(0.0, "float32")), T.Then():
                    emit_neuron()
        v.store(counts, thread, fired.get(), 1)
        if squares is not None:
            v.store(squares.own, thread, square_sum.get(), 1)

    emit_shared(threads, v.wide(count) * spec.bundle.neuron_bytes, emit_thread)
    emit_add(spec, partial, total, token)
    if squares is not None:
        squares.emit_add(threads, token)
    emit_count(spec, counts)
