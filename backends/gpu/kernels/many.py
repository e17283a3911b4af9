"""Products of many tokens: a work group computes 64 tokens by 64 columns, 32 terms at a time.

The terms of both sides go through memory that the group shares, weights as float32 times their
scales; a thread keeps 4 tokens by 4 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.weights import WORDS, Weights, place_elements, unpack_word
from pi2.plan.weights.layout import GROUP

TOKENS = 64
"""Tokens of a work group."""
COLUMNS = 64
"""Columns of a work group: two *strips* of 32."""
STRIP = 32
SIDE = 16
"""Threads of a work group along both axes."""
BLOCK = (SIDE, SIDE, 1)
_THREADS = SIDE * SIDE
_EACH = TOKENS // SIDE
"""Tokens, and columns, of a thread."""
_PITCH = COLUMNS + 1
"""Elements from one term to the next: neighbouring terms lie in different banks."""


class Panels:
    """The shared memory of a work group."""

    def __init__(self) -> None:
        self.weights = c.share(GROUP * _PITCH)
        self.inputs = c.share(GROUP * _PITCH)

    def store_word(
        self,
        weights: Weights,
        word: c.Expr,
        scale: c.Expr,
        elements: Sequence[c.Expr],
        first: c.Expr,
        stride: int,
    ) -> None:
        """Unpack a word of weights; its elements go to ``first`` and ``stride`` times their
        numbers."""
        for element, value in zip(elements, unpack_word(weights.precision, word), strict=True):
            c.store(self.weights, first + element * stride, value * scale)


def count_thread(place: c.Place) -> c.Expr:
    """Return the number of a thread in its group."""
    return c.let(place.thread[1] * SIDE + place.thread[0])


def emit_many(
    place: c.Place,
    steps: c.Expr,
    load: Callable[[Panels, c.Expr], None],
    finish: Callable[[c.Expr, int, list[c.Expr]], None],
) -> None:
    """Add up ``steps`` times 32 terms.

    ``load(panels, step)`` fills both panels, all threads together.  ``finish(token, half, sums)``
    is added for every token of a thread: ``token`` is below 64, and ``sums`` are those of column
    ``16 half + x`` of every strip, x being the thread's place along the first axis.
    """
    x, y, _ = place.thread
    panels = Panels()
    sums = [c.make_zeros(_EACH) for _ in range(_EACH)]
    with T.serial(steps) as step:
        load(panels, c.let(step))
        c.wait_for_group()
        with T.serial(GROUP) as term:
            row = c.let(term * _PITCH)
            values = [c.let(panels.inputs[row + y + SIDE * index]) for index in range(_EACH)]
            columns = [c.let(panels.weights[row + x + SIDE * index]) for index in range(_EACH)]
            for value, cells in zip(values, sums, strict=True):
                for column, cell in zip(columns, cells, strict=True):
                    cell.add(value * column)
        c.wait_for_group()
    for index, cells in enumerate(sums):
        token = c.let(y + SIDE * index)
        for half in range(STRIP // SIDE):
            strips = range(COLUMNS // STRIP)
            finish(token, half, [cells[strip * 2 + half].get() for strip in strips])


def emit_load_inputs(
    panels: Panels,
    place: c.Place,
    read: Callable[[c.Expr, c.Expr], c.Expr],
) -> None:
    """Fill the panel of inputs; ``read(token, term)`` gives one, of a token below 64 and a term
    below 32.  Neighbouring threads read neighbouring terms."""
    thread = count_thread(place)
    term = c.let(T.floormod(thread, GROUP))
    first = c.let(T.floordiv(thread, GROUP))
    for index in range(TOKENS * GROUP // _THREADS):
        token = c.let(first + index * (_THREADS // GROUP))
        c.store(panels.inputs, term * _PITCH + token, read(token, term))


def emit_load_tiles(
    panels: Panels,
    place: c.Place,
    weights: Weights,
    strips: Sequence[c.Expr],
    group: c.Expr,
    groups: int,
) -> None:
    """Fill the panel of weights with a group of the rows of two tiles' parts, ``strips``: their
    numbers among all parts of all tiles."""
    words = WORDS[weights.precision]
    thread = count_thread(place)
    for start in range(0, len(strips) * STRIP * words, _THREADS):
        index = c.let(thread + start)
        strip = c.let(T.floordiv(index, STRIP * words))
        in_strip = c.let(T.floormod(index, STRIP * words))
        # Vectors of 4 words, of one row after the other.
        vector, rest = T.floordiv(in_strip, STRIP * 4), c.let(T.floormod(in_strip, STRIP * 4))
        row = c.let(T.floordiv(rest, 4))
        word = c.let(vector * 4 + T.floormod(rest, 4))
        part = c.let(T.Select(strip == 0, strips[0], strips[1]))
        block = c.let(part * groups + group)
        (packed,) = weights.load(block * (STRIP * words) + in_strip)
        scale = weights.load_scale(block * STRIP + row)
        column = c.let(strip * STRIP + row)
        elements = [c.let(element) for element in place_elements(weights.precision, word)]
        panels.store_word(weights, packed, scale, elements, column, _PITCH)


def emit_load_vectors(
    panels: Panels,
    place: c.Place,
    weights: Weights,
    find_row: Callable[[c.Expr, c.Expr], c.Expr],
    group: c.Expr,
    groups: int,
) -> None:
    """Fill the panel of weights with a group of 64 vectors in rows: ``find_row(strip, column)``
    says which row the one of a strip's column below 32 is."""
    words = WORDS[weights.precision]
    thread = count_thread(place)
    for start in range(0, COLUMNS * words, _THREADS):
        index = c.let(thread + start)
        column = c.let(T.floordiv(index, words))
        word = c.let(T.floormod(index, words))
        strip, in_strip = c.let(T.floordiv(column, STRIP)), c.let(T.floormod(column, STRIP))
        block = c.let(find_row(strip, in_strip) * groups + group)
        (packed,) = weights.load(block * words + word)
        scale = weights.load_scale(block)
        elements = [c.let(element) for element in place_elements(weights.precision, word)]
        panels.store_word(weights, packed, scale, elements, column, _PITCH)


def emit_load_rows(
    panels: Panels,
    place: c.Place,
    weights: Weights,
    read_row: Callable[[c.Expr], c.Expr],
    first_group: c.Expr,
    groups: int,
) -> None:
    """Fill the panel of weights with two groups, from ``first_group`` on, of 32 vectors in rows;
    ``read_row(term)`` says which row a term below 32 is."""
    words = WORDS[weights.precision]
    thread = count_thread(place)
    for start in range(0, GROUP * 2 * words, _THREADS):
        index = c.let(thread + start)
        term = c.let(T.floordiv(index, 2 * words))
        in_row = c.let(T.floormod(index, 2 * words))
        strip = c.let(T.floordiv(in_row, words))
        word = c.let(T.floormod(in_row, words))
        # A group beyond the last is read again and not used.
        group = c.let(T.min(first_group + strip, groups - 1))
        block = c.let(read_row(term) * groups + group)
        (packed,) = weights.load(block * words + word)
        scale = weights.load_scale(block)
        first = c.let(term * _PITCH + strip * STRIP)
        elements = [c.let(element) for element in place_elements(weights.precision, word)]
        panels.store_word(weights, packed, scale, elements, first, 1)
