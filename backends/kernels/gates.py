"""Gates of gathered neurons, for those of which nothing but the gate has been read."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_shared, emit_split
from pi2.backends.kernels.neurons import Bundles
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.places import TOGETHER
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.weights.layout import vector_bytes


def emit_gathered_gates(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    bundles: Bundles,
    slots: v.Buffer,
    rows: v.Buffer | None,
    count: v.Expr,
    gates: v.Buffer,
    token: v.Expr,
) -> None:
    """Set ``gates`` float32 [count] to the gates of the neurons ``slots`` int32 [count] of
    ``bundles`` for ``token``, the same bits as `gathered` computes; ``rows`` int32 [count] of
    resident scales."""

    def emit(thread: v.Expr) -> None:
        begin, end = emit_split(thread, spec.threads, count)
        with T.serial(T.floordiv(end - begin + (TOGETHER - 1), TOGETHER)) as turn:
            top = v.let(begin + turn * TOGETHER)
            # A repeated neuron writes the same value again.
            places = [v.let(T.min(top + index, end - 1)) for index in range(TOGETHER)]
            neurons = [
                bundles.find(slots[place], None if rows is None else rows[place])
                for place in places
            ]
            parts = [bundles.take_part(neuron, "gate") for neuron in neurons]
            found = emit_dots(isa, parts, activations, [token])
            for place, gate in zip(places, found, strict=True):
                v.store(gates, place, gate[0], 1)

    emit_shared(spec.threads, v.wide(count) * vector_bytes(spec.hidden, spec.ffn), emit)
