"""The FFN of one token over the neurons in some slots, and the selection of these neurons.

A slot holds a neuron's vectors one after the other, each in rows (`pi2.backends.gpu.packing`).

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``gathered_values``     inputs float32 [hidden], slot weights, scales, [biases float32 [slots,
                        parts]], [routes float32 [experts], experts int32 [slots]], slots int32
                        [most], found int32 [1], values float32 [most]; most
``gathered_sums``       values, slots, found, down weights in rows, scales, partials float32
                        [parts, hidden]; most, parts, tokens (1)
``select``              scores float32 [n], slots, found; n, threshold
======================  ==========================================================================

``found`` is how many of ``slots`` count: the device itself knows it, work is started for ``most``.
``select`` writes the ascending places of scores that are at least ``threshold``.  ``join`` of the
dense FFN adds up the partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.few import BLOCK, ROWS, SLICES
from pi2.backends.gpu.kernels.ffn import Epilogue, emit_sums
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.kernels.weights import WORDS, Weights, list_elements, unpack_word
from pi2.plan.weights.layout import GROUP

_SELECTORS = 256
"""Threads of ``select``, all in one work group."""


def list_gathered_kernels(ffn: FfnKernels, fp16: bool) -> Iterator[c.Kernel]:
    """Make all of them."""
    yield make_gathered_values(ffn, fp16)
    yield make_gathered_sums(ffn, fp16)
    yield make_select()


def make_gathered_values(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    """Make ``gathered_values``: 32 threads share a neuron, and read neighbouring words of it."""
    kernel = c.Kernel("gathered_values", BLOCK)
    words = WORDS[ffn.precision]
    groups = ffn.hidden // GROUP
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32")
        weights = Weights.take(kernel, "gate_up", ffn.precision, 1, fp16)
        epilogue = Epilogue(kernel, ffn)
        slots = kernel.take_array("slots", "int32")
        found = kernel.take_array("found", "int32")
        values = kernel.take_array("values", "float32")
        kernel.take_number("most")
        with kernel.run(Axis(number="most", per=SLICES)) as place:
            lane, turn, _ = place.thread
            index = c.let(place.group[0] * SLICES + turn)
            count = c.let(found[0])
            # Threads beyond the last neuron repeat it: all of them arrive at the barrier.
            slot = c.let(slots[T.max(T.min(index, count - 1), 0)])
            sums = c.make_zeros(ffn.parts)
            with T.serial(-(-groups * words // ROWS)) as step:
                word = c.let(step * ROWS + lane)
                with c.when(word < groups * words):
                    _add_word(ffn, weights, inputs, slot, word, sums)
            shared = c.share(SLICES * ffn.parts * ROWS)
            for part, cell in enumerate(sums):
                c.store(shared, (turn * ffn.parts + part) * ROWS + lane, cell.get())
            c.wait_for_group()
            with c.when(T.And(lane == 0, index < count)):
                products = []
                for part in range(ffn.parts):
                    total = c.Cell(c.number(0.0))
                    with T.serial(ROWS) as piece:
                        total.add(shared[(turn * ffn.parts + part) * ROWS + piece])
                    products.append(total.get())
                c.store(values, index, epilogue.compute(slot, T.int32(0), products))
    return kernel


def _add_word(
    ffn: FfnKernels,
    weights: Weights,
    inputs: c.Buffer,
    slot: c.Expr,
    word: c.Expr,
    sums: list[c.Cell],
) -> None:
    """Add the products of a word of every part."""
    words = WORDS[ffn.precision]
    groups = ffn.hidden // GROUP
    group = c.let(T.floordiv(word, words))
    in_group = c.let(T.floormod(word, words))
    # Of every word the first element differs alone.
    elements = list_elements(ffn.precision, 0)
    step = list_elements(ffn.precision, 1)[0] - elements[0]
    first = c.let(group * GROUP + in_group * step)
    read = [c.let(inputs[first + element]) for element in elements]
    for part, cell in enumerate(sums):
        row = c.let(slot * ffn.parts + part)
        (packed,) = weights.load(row * (groups * words) + word)
        scale = weights.load_scale(row * groups + group)
        total = c.Cell(c.number(0.0))
        for value, number in zip(read, unpack_word(ffn.precision, packed), strict=True):
            total.add(value * number)
        cell.add(total.get() * scale)


def make_gathered_sums(ffn: FfnKernels, fp16: bool) -> c.Kernel:
    """Make ``gathered_sums``."""
    kernel = c.Kernel("gathered_sums", BLOCK)
    with kernel.declare():
        slots = kernel.take_array("slots", "int32")
        found = kernel.take_array("found", "int32")
        kernel.take_number("most")

        def find_row(index: c.Expr) -> c.Expr:
            return slots[index]

        emit_sums(kernel, ffn, fp16, 1, lambda: c.let(found[0]), find_row)
    return kernel


def make_select() -> c.Kernel:
    """Make ``select``: every thread counts in a stretch of the scores, then writes its own."""
    kernel = c.Kernel("select", (_SELECTORS, 1, 1))
    with kernel.declare():
        scores = kernel.take_array("scores", "float32")
        slots = kernel.take_array("slots", "int32")
        found = kernel.take_array("found", "int32")
        size = kernel.take_number("n")
        threshold = kernel.take_number("threshold", "float32")
        with kernel.run() as place:
            thread = place.thread[0]
            stretch = c.let(c.divide_up(size, _SELECTORS))
            first = c.let(thread * stretch)
            end = c.let(T.min(first + stretch, size))
            own = c.Cell(T.int32(0))
            with T.serial(stretch) as turn:
                index = c.let(first + turn)
                with c.when(index < end):
                    with c.when(scores[index] >= threshold):
                        own.add(T.int32(1))
            counts = c.share(_SELECTORS, "int32")
            c.store(counts, thread, own.get())
            c.wait_for_group()
            # The counts of all threads before this one, in steps that double.
            distance = 1
            while distance < _SELECTORS:
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
                    with c.when(scores[index] >= threshold):
                        c.store(slots, place_of_next.get(), index)
                        place_of_next.add(T.int32(1))
            with c.when(thread == _SELECTORS - 1):
                c.store(found, T.int32(0), counts[thread])
    return kernel
