"""The FFN over the neurons in some slots, other ones for every token.

A slot holds a neuron's vectors one after the other, each in rows (`pi2.backends.gpu.packing`).

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``gates``               inputs float32 [T, hidden], slot weights, scales, [biases float32 [slots,
                        parts]], [order int32 [most]], scores float32 [T, most]; most, tokens
``gathered_values``     inputs, slot weights, scales, [biases], [routes float32 [T, experts],
                        experts int32 [slots]], slots int32 [T, most], found int32 [first + T],
                        values float32 [T, most]; most, first, tokens
``gathered_sums``       values, slots, found, down weights in rows, scales, partials float32
                        [parts, T, hidden]; most, first, parts, tokens
======================  ==========================================================================

``found[first + t]`` is how many of token t's ``slots`` count: the device itself knows it
(`pi2.backends.gpu.kernels.gathered`), work is started for ``most``.  ``gates`` multiplies with all
gates, or with the up rows of neurons that have none; ``order`` says which slot each is in. ``join``
of the dense FFN adds up the partial sums.

The neurons that compute a token, selected on the device.

``select``: [scores float32 [T, n]], [routes float32 [T, experts], order int32 [n]], slots int32 [T,
n], found int32 [first + T]; n, first, tokens, [threshold].

Number i of a token's n neurons is selected where its score is at least ``threshold``, if there are
scores, and in an MoE model where the router chose its expert: neurons come expert by expert, and
``order`` says in which slot each of them lies.  ``slots`` are those of the selected ones in this
order, ``found[first + t]`` how many they are."""

from collections.abc import Callable, Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.code import Weights, count_words, place_elements, unpack_word
from pi2.backends.gpu.kernels.ffn import Epilogue, emit_sums
from pi2.backends.gpu.kernels.products import BLOCK, ROWS, SLICES
from pi2.backends.gpu.kernels.specification import Axis, FfnKernels, SelectKernels
from pi2.plan.weights.layout import GROUP

_THREADS = 256
"""Threads of a work group, which selects for a token."""


def make_select(select: SelectKernels) -> c.Kernel:
    """Make ``select``: every thread counts in a range of the neurons, then writes its own."""
    with c.Kernel.declare("select", (_THREADS, 1, 1)) as kernel:
        scores = kernel.take_array("scores") if select.scored else None
        routes = kernel.take_array("routes") if select.experts else None
        order = kernel.take_array("order", "int32") if select.experts else None
        slots, found = kernel.take_arrays("slots found", "int32")
        size, first_found = kernel.take_numbers("n first")
        kernel.take_number("tokens")
        threshold = kernel.take_number("threshold", "float32") if select.scored else None
        with kernel.run(Axis(number="tokens")) as place:
            token, thread = place.group[0], place.thread[0]
            stretch = c.let(c.divide_up(size, _THREADS))
            first = c.let(thread * stretch)
            end = c.let(T.min(first + stretch, size))

            def is_selected(index: c.Expr) -> c.Expr:
                wanted: c.Expr = T.int32(1)
                if scores is not None:
                    wanted = T.cast(scores[token * size + index] >= threshold, "int32")
                if routes is not None:
                    expert = c.let(T.floordiv(index, select.expert_neurons))
                    route = c.let(routes[token * select.experts + expert])
                    chosen = T.max(route, c.number(0.0) - route) > c.number(0.0)
                    wanted = wanted * T.cast(chosen, "int32")
                return c.let(wanted)

            own = c.Cell(T.int32(0))
            with T.serial(stretch) as turn:
                index = c.let(first + turn)
                with c.when(index < end):
                    own.add(is_selected(index))
            counts = c.share(_THREADS, "int32")
            c.store(counts, thread, own.get())
            c.wait_for_group()
            # The counts of all threads before this one, in steps that double.
            distance = 1
            while distance < _THREADS:
                before = c.Cell(counts[thread])
                with c.when(thread >= distance):
                    before.add(counts[thread - distance])
                c.wait_for_group()
                c.store(counts, thread, before.get())
                c.wait_for_group()
                distance *= 2
            place_of_next = c.Cell(counts[thread] - own.get())
            with T.serial(stretch) as turn:
                index = c.let(first + turn)
                with c.when(index < end):
                    with c.when(is_selected(index) > 0):
                        slot = index if order is None else order[index]
                        c.store(slots, token * size + place_of_next.get(), slot)
                        place_of_next.add(T.int32(1))
            with c.when(thread == _THREADS - 1):
                c.store(found, first_found + token, counts[thread])
    return kernel


def list_gathered_kernels(ffn: FfnKernels, fp16: bool) -> Iterator[c.Kernel]:
    """Make all of them but ``gates``."""
    yield make_gathered_values(ffn, fp16)
    yield make_gathered_sums(ffn, fp16)


def make_gates(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    with c.Kernel.declare("gates", BLOCK) as kernel:
        inputs = kernel.take_array("inputs")
        weights = Weights.take(kernel, "gate_up", ffn.precision, 1, fp16)
        biases = kernel.take_array("biases") if ffn.options.bias else None
        order = kernel.take_array("order", "int32") if ffn.experts else None
        scores = kernel.take_array("scores")
        most = kernel.take_number("most")
        kernel.take_number("tokens")
        with kernel.run(Axis(number="most", per=SLICES), Axis(number="tokens")) as place:
            token = place.group[1]
            index = c.let(place.group[0] * SLICES + place.thread[1])
            read = c.let(T.min(index, most - 1))
            slot = read if order is None else c.let(order[read])
            first = c.let(token * ffn.hidden)
            sums = _multiply(ffn, weights, inputs, first, slot, place, 1, T.int32(1))

            def finish(products: list[c.Expr]) -> None:
                score = products[0]
                if biases is not None:
                    score = score + biases[slot * ffn.parts]
                c.store(scores, token * most + index, score)

            _finish(sums, place, index < most, finish)
    return kernel


def make_gathered_values(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    """Make ``gathered_values``: 32 threads share a neuron, and read neighbouring words of it."""
    with c.Kernel.declare("gathered_values", BLOCK) as kernel:
        inputs = kernel.take_array("inputs")
        weights = Weights.take(kernel, "gate_up", ffn.precision, 1, fp16)
        epilogue = Epilogue(kernel, ffn)
        slots, found = kernel.take_arrays("slots found", "int32")
        values = kernel.take_array("values")
        most, first_found = kernel.take_numbers("most first")
        kernel.take_number("tokens")
        with kernel.run(Axis(number="most", per=SLICES), Axis(number="tokens")) as place:
            token = place.group[1]
            index = c.let(place.group[0] * SLICES + place.thread[1])
            count = c.let(found[first_found + token])
            # All threads arrive at the barrier: those beyond the last neuron repeat it, and groups
            # beyond it read nothing.
            slot = c.let(slots[token * most + T.max(T.min(index, count - 1), 0)])
            busy = c.let(T.cast(place.group[0] * SLICES < count, "int32"))
            first = c.let(token * ffn.hidden)
            sums = _multiply(ffn, weights, inputs, first, slot, place, ffn.parts, busy)

            def finish(products: list[c.Expr]) -> None:
                c.store(values, token * most + index, epilogue.compute(slot, token, products))

            _finish(sums, place, index < count, finish)
    return kernel


def _multiply(
    ffn: FfnKernels,
    weights: Weights,
    inputs: c.Buffer,
    begin: c.Expr,
    slot: c.Expr,
    place: c.Place,
    parts: int,
    busy: c.Expr,
) -> list[c.Cell]:
    """Return a thread's sums of the first ``parts`` vectors of a slot, times ``inputs`` from
    ``begin`` on; nothing is read where ``busy`` is 0."""
    words, groups = count_words(ffn.precision), ffn.hidden // GROUP
    # Of every word the first element differs alone.
    elements = place_elements(ffn.precision, 0)
    step_of_word = place_elements(ffn.precision, 1)[0] - elements[0]
    sums = c.make_zeros(parts)
    with T.serial(busy * -(-groups * words // ROWS)) as step:
        word = c.let(step * ROWS + place.thread[0])
        with c.when(word < groups * words):
            group, in_group = c.let(T.floordiv(word, words)), c.let(T.floormod(word, words))
            first = c.let(begin + group * GROUP + in_group * step_of_word)
            read = [c.let(inputs[first + element]) for element in elements]
            for part, cell in enumerate(sums):
                row = c.let(slot * ffn.parts + part)
                (packed,) = weights.load(row * (groups * words) + word)
                scale = weights.load_scale(row * groups + group)
                total = c.Cell(c.number(0.0))
                numbers = unpack_word(ffn.precision, packed)
                for value, number in zip(read, numbers, strict=True):
                    total.add(value * number)
                cell.add(total.get() * scale)
    return sums


def _finish(
    sums: list[c.Cell], place: c.Place, inside: c.Expr, finish: Callable[[list[c.Expr]], None]
) -> None:
    """Add up what the 32 threads of a neuron have; one of them does the rest."""
    lane, turn, _ = place.thread
    parts = len(sums)
    shared = c.share(SLICES * parts * ROWS)
    for part, cell in enumerate(sums):
        c.store(shared, (turn * parts + part) * ROWS + lane, cell.get())
    c.wait_for_group()
    with c.when(T.And(lane == 0, inside)):
        products = []
        for part in range(parts):
            total = c.Cell(c.number(0.0))
            with T.serial(ROWS) as piece:
                total.add(shared[(turn * parts + part) * ROWS + piece])
            products.append(total.get())
        finish(products)


def make_gathered_sums(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    with c.Kernel.declare("gathered_sums", BLOCK) as kernel:
        slots, found = kernel.take_arrays("slots found", "int32")
        most, first = kernel.take_numbers("most first")

        def count_neurons(token: c.Expr) -> c.Expr:
            return c.let(found[first + token])

        def find_row(token: c.Expr, index: c.Expr) -> c.Expr:
            return slots[token * most + index]

        emit_sums(kernel, ffn, fp16, 1, most, count_neurons, find_row)
    return kernel
