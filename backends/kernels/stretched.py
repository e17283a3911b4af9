"""The FFN of one token over stretches of neurons, all of which have an effect: a mixture's chosen
experts with a smooth activation, in whose memory one neuron follows another.

Every thread takes neighbours, as many as the others, two at a time: gates and ups, then downs.  A
processor's own reading ahead does not follow vectors of a kilobyte, so that all lines of a neuron
are asked for some neurons before it, at the pace of the arithmetic; with more neurons at a time,
the cache loses what it was asked for.  Which thread adds a neuron, and when, depends on its place
among all neurons of a call alone, not on how they are divided into stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.gathered import emit_downs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import LINE, emit_shared, emit_split
from pi2.backends.kernels.neurons import Bundles, Neuron
from pi2.backends.kernels.operands import Activations, Prefetch, Vector
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.thread_sums import Squares, emit_add, emit_clear, emit_count
from pi2.backends.kernels.values import emit_values, take_inputs
from pi2.plan.weights.layout import scale_bytes

TOGETHER = 2
"""Neurons that a thread computes at the same time: 34 GB/s of 40 to 48, where four got 28."""
AHEAD = 4
"""How many neurons further on memory is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Neurons of a call: ``size`` neighbours from slot ``size`` times ``slots[i]`` on, int32
    [count]; ``rows``, likewise, of resident scales."""

    slots: v.Buffer
    rows: v.Buffer | None
    count: v.Expr
    size: v.Expr

    def find(self, bundles: Bundles, place: v.Expr) -> Neuron:
        """Return the neuron at a place among all of them."""
        number = v.let(T.floordiv(place, self.size))
        index = v.let(place - number * self.size)
        row = None if self.rows is None else v.let(self.rows[number] * self.size + index)
        return bundles.find(v.let(self.slots[number] * self.size + index), row)


def emit_stretched(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    bundles: Bundles,
    stretches: Stretches,
    partial: v.Buffer,
    counts: v.Buffer,
    total: v.Buffer,
    routes: v.Buffer | None,
    token: v.Expr,
    squares: Squares | None = None,
) -> None:
    """Add the neurons of ``stretches`` to ``total`` float32 [hidden] (lane order) of ``token``.

    ``partial`` float32 [threads, hidden]: one sum per thread, added up in the order of threads;
    ``counts`` int32 [threads + 1]: the last one counts non-zero activations, ever; ``routes``
    float32 [experts]: weights of a mixture's experts, None without; ``squares`` of activations,
    where they are normalised.
    """
    threads, zero = spec.threads, v.constant(0.0, "float32")
    every = v.let(stretches.count * stretches.size)

    def emit_thread(thread: v.Expr) -> None:
        origin = emit_clear(spec, partial, thread)
        begin, end = emit_split(thread, threads, every)
        fired, square_sum = v.Cell(T.int32(0)), v.Cell(zero)
        with T.serial(T.floordiv(end - begin + (TOGETHER - 1), TOGETHER)) as turn:
            first = v.let(begin + turn * TOGETHER)
            # The last neuron stands for those beyond it.
            neurons, following = (
                [
                    stretches.find(bundles, v.let(T.min(first + distance + index, end - 1)))
                    for index in range(TOGETHER)
                ]
                for distance in (0, AHEAD)
            )
            inputs = [vector for neuron in following for vector in take_inputs(bundles, neuron)]
            ask = _ask_for(spec, inputs)
            found = emit_values(isa, activations, bundles, neurons, [token], routes, ask)
            values = [
                v.let(T.Select(first + index < end, row[0], zero))
                for index, row in enumerate(found)
            ]
            for value in values:
                fired.set(fired.get() + T.Select(value != zero, T.int32(1), T.int32(0)))
                if squares is not None:
                    square_sum.set(T.fma(value, value, square_sum.get()))
            downs, next_downs = (
                [bundles.take_part(neuron, "down") for neuron in some]
                for some in (neurons, following)
            )
            ask = _ask_for(spec, next_downs)
            emit_downs(isa, spec, downs, values, partial, origin, activations.once, ask)
        v.store(counts, thread, fired.get(), 1)
        if squares is not None:
            v.store(squares.own, thread, square_sum.get(), 1)

    emit_shared(threads, v.wide(every) * spec.bundle.neuron_bytes, emit_thread)
    emit_add(spec, partial, total, token)
    if squares is not None:
        squares.emit_add(threads, token)
    emit_count(spec, counts)


def _ask_for(spec: KernelSpec, vectors: Sequence[Vector]) -> Prefetch:
    """Ask for the scales of ``vectors``; return what asks for their weights while others are
    read."""
    for vector in vectors:
        # Neurons side by side share the scales of every element.
        for line in range(0, 0 if vector.spread else scale_bytes(spec.hidden, spec.ffn), LINE):
            v.prefetch(vector.scales, vector.scales_base + line)

    def ask(index: int, byte: v.Expr, size: int) -> None:
        for line in range(0, size, LINE):
            v.prefetch(vectors[index].weights, vectors[index].weights_base + byte + line)

    return ask
