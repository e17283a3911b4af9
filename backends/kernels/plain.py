"""FFNs whose neurons have biases or no gate: down(act(up x + bias)).

One pass over a neuron: its value from all vectors but the last, then the last one, unless the value
is zero.  Bundles as `pi2.plan.weights.layout` says; biases are float32 in the bundle.

The FFN of one token over stretches of neurons, all of which have an effect: an MoE model's chosen
experts with a smooth activation, in whose memory one neuron follows another.

Every thread takes neighbours, as many as the others, two at a time: gates and ups, then downs.  A
processor's own reading ahead does not follow vectors of a kilobyte, so that all lines of a neuron
are asked for some neurons before it: one neuron after the other in the order of memory, and at the
pace of the arithmetic, of which downs take most.  With more neurons at a time, the cache loses what
it was asked for.  Which thread adds a neuron, and when, depends on its place among all neurons of
its part alone, not on how they are divided into stretches, nor on the parts of other calls: each
part has sums of its own, which are added up in the order of the parts' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    emit_add_parts,
    emit_clear,
    emit_count,
    emit_downs,
    emit_values,
    load_route,
)
from pi2.backends.kernels.operands import LINE, Activations
from pi2.plan.weights.layout import GROUP, weight_bytes

TOGETHER = 2
"""Neurons that a thread computes at the same time: 34 GB/s of 40 to 48; four got 28."""
AHEAD = 4
"""How many neurons further on memory is asked for."""
INPUTS_SHARE = 0.2
"""Share of the lines that is prefetched while gates and ups are read; the others are while downs
are added up: 39 GB/s of 43; line by line in turns, they got 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Neurons of a call: ``size`` neighbours from slot ``size`` times ``slots[i]`` on, int32
    [count]; ``rows``, likewise, of resident scales."""

    slots: v.Buffer
    rows: v.Buffer | None
    count: v.Expr
    size: v.Expr

    def find(self, bundles: Bundles, place: v.Expr) -> Neuron:
        """Return the neuron at a place among all of them.

        Neurons of a range have one expert: its number is read once, from the first of them."""
        number, index = self._divide(place)
        first = v.let(self.slots[number] * self.size)
        row = None if self.rows is None else self.find_row(place)
        neuron = bundles.find(v.let(first + index), row)
        return replace(neuron, expert_base=v.let(v.wide(first) * bundles.spec.stride))

    def find_row(self, place: v.Expr) -> v.Expr:
        assert self.rows is not None
        number, index = self._divide(place)
        return v.let(self.rows[number] * self.size + index)

    def _divide(self, place: v.Expr) -> tuple[v.Expr, v.Expr]:
        number = v.let(T.floordiv(place, self.size))
        return number, v.let(place - number * self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSums:
    """Parts of a call's neurons, ``size`` each but for the last one, and where their sums are:
    ``sums`` float32 [parts threads, hidden], in the places that ``numbers`` int32 [parts] say.
    ``finished``: how many parts are added up at last, from number 0 on."""

    size: v.Expr
    numbers: v.Buffer
    sums: v.Buffer
    finished: v.Expr


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


def emit_stretched(
    isa: Isa,
    activations: Activations,
    bundles: Bundles,
    stretches: Stretches,
    parts: PartSums,
    sums: Sums,
) -> None:
    """Compute the neurons of ``stretches``, and add the ``finished`` parts to the total.

    Each thread has its own sum of each part, and they are added up part by part in the order of
    threads."""
    spec, squares, token = bundles.spec, sums.squares, sums.token
    threads, zero = spec.threads, v.constant(0.0, "float32")
    every = v.let(stretches.count * stretches.size)

    def emit_thread(thread: v.Expr) -> None:
        fired, square_sum = v.Cell(T.int32(0)), v.Cell(zero)
        with T.serial(T.floordiv(every + (parts.size - 1), parts.size)) as part:
            own = v.let(parts.numbers[part] * threads + thread)
            origin = emit_clear(spec, parts.sums, own)
            begin, end = _find_own(thread, threads, parts.size, part, every)
            # What is asked for ahead at the end of a part is the beginning of the next one.
            beyond, _ = _find_own(thread, threads, parts.size, part + 1, every)
            with T.serial(T.floordiv(end - begin + (TOGETHER - 1), TOGETHER)) as turn:
                first = v.let(begin + turn * TOGETHER)
                # The last neuron stands for those beyond it.
                neurons = [
                    stretches.find(bundles, v.let(T.min(first + index, end - 1)))
                    for index in range(TOGETHER)
                ]

                def find_ahead(
                    distance: int, first: v.Expr = first, end: v.Expr = end, beyond: v.Expr = beyond
                ) -> v.Expr:
                    place = v.let(first + distance)
                    place = T.Select(place < end, place, beyond + (place - end))
                    return v.let(T.min(place, every - 1))

                following = [
                    stretches.find(bundles, find_ahead(AHEAD + index)) for index in range(TOGETHER)
                ]
                lines = _LinesAhead(bundles, following)
                found = emit_values(
                    isa, activations, bundles, neurons, token, sums.routes, lines.ask_with_inputs
                )
                values = [
                    v.let(T.Select(first + index < end, value, zero))
                    for index, value in enumerate(found)
                ]
                for value in values:
                    fired.set(fired.get() + T.Select(value != zero, T.int32(1), T.int32(0)))
                    if squares is not None:
                        square_sum.set(T.fma(value, value, square_sum.get()))
                downs = [bundles.take_part(neuron, "down") for neuron in neurons]
                if bundles.scales is not None:
                    distance = GROUP if spec.bundle.parts[-1].spread else AHEAD
                    for index in range(TOGETHER):
                        row = stretches.find_row(find_ahead(distance + index))
                        _ask_for_scales(bundles, row)
                once = activations.once
                weighed = list(zip(downs, values, strict=True))
                emit_downs(isa, spec, weighed, parts.sums, origin, once, lines.ask_with_downs)
        v.store(sums.counts, thread, fired.get(), 1)
        if squares is not None:
            v.store(squares.own, thread, square_sum.get(), 1)

    emit_shared(threads, v.wide(every) * spec.bundle.neuron_bytes, emit_thread)
    emit_add_parts(spec, parts.sums, parts.finished, sums.total, token)
    if squares is not None:
        squares.emit_add(threads, token)
    emit_count(spec, sums.counts)


def _find_own(
    thread: v.Expr, threads: int, size: v.Expr, part: v.Expr, every: v.Expr
) -> tuple[v.Expr, v.Expr]:
    """Return the places of the first neuron that ``thread`` has of a part, and behind its last."""
    start = v.let(T.min(part * size, every))
    length = v.let(T.min(size, every - start))
    begin, end = emit_split(thread, threads, length)
    return v.let(start + begin), v.let(start + end)


class _LinesAhead:
    def __init__(self, bundles: Bundles, neurons: Sequence[Neuron]) -> None:
        spec = bundles.spec
        self._arena = bundles.arena
        self._neurons = neurons
        self._own = -(-spec.bundle.used_bytes // LINE)
        """Lines of a neuron, which begins with one."""
        every = self._own * len(neurons)
        self._with_inputs = round(INPUTS_SHARE * every)
        self._with_downs = every - self._with_inputs
        self._gate_bytes = weight_bytes(spec.hidden, spec.precision.gates)
        self._down_bytes = weight_bytes(spec.hidden, spec.precision.ffn)

    def ask_with_inputs(self, index: int, byte: v.Expr, size: int) -> None:
        """Ask for the first lines, at the pace at which gates and ups are read."""
        if index == 0:
            self._ask(byte, size, self._gate_bytes, 0, self._with_inputs)

    def ask_with_downs(self, index: int, byte: v.Expr, size: int) -> None:
        if index == 0:
            self._ask(byte, size, self._down_bytes, self._with_inputs, self._with_downs)

    def _ask(self, byte: v.Expr, size: int, whole: int, first: int, count: int) -> None:
        """Ask for as many of ``count`` lines from ``first`` on as ``size`` bytes are of a vector's
        ``whole`` weights; the vector is read at ``byte``."""
        start = v.let(T.floordiv(byte * count, whole) + first)
        number = v.let(T.floordiv(start, self._own))
        base = self._neurons[-1].base
        for index, neuron in enumerate(self._neurons[:-1]):
            base = T.Select(number == index, neuron.base, base)
        place = v.let(base + (start - number * self._own) * LINE)
        for line in range(-(-size * count // whole)):
            v.prefetch(self._arena, place + line * LINE)


def _ask_for_scales(bundles: Bundles, row: v.Expr) -> None:
    """Prefetch a row of resident scales; for a part, the scales that 32 neurons share."""
    stride = bundles.spec.bundle.scales_stride
    for line in range(0, stride, LINE):
        v.prefetch(bundles.scales, v.wide(row) * stride + line)


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
