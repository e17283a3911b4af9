"""Products of a few tokens with rows of weights: every weight is read once for all of them.

A work group has 32 rows by 8 slices of the row: neighbouring threads read neighbouring vectors of
16 bytes, and all threads of a row of the group read the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.weights import WORDS, Weights, list_elements, unpack_word
from pi2.plan.weights.layout import GROUP

ROWS = 32
"""Rows of a tile, and threads of a work group along its first axis."""
SLICES = 8
"""Threads that share a row."""
VECTOR = 4
"""Words that a thread reads together."""
BLOCK = (ROWS, SLICES, 1)

Finish = Callable[[c.Expr, c.Expr, list[c.Expr]], None]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Weights in tiles of 32 rows, each with ``parts`` vectors."""

    weights: Weights
    parts: int
    length: int

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.length // GROUP

    def load_group(self, tile: c.Expr, part: int, group: c.Expr, row: c.Expr) -> list[c.Expr]:
        """Return the words of a group."""
        vectors = WORDS[self.weights.precision] // VECTOR
        first = c.let(((tile * self.parts + part) * self.groups + group) * vectors)
        words: list[c.Expr] = []
        for vector in range(vectors):
            words += self.weights.load((first + vector) * ROWS + row)
        return words

    def load_scale(self, tile: c.Expr, part: int, group: c.Expr, row: c.Expr) -> c.Expr:
        """Return the scale of a group."""
        return self.weights.load_scale(
            ((tile * self.parts + part) * self.groups + group) * ROWS + row
        )


def emit_few(
    tiles: Tiles,
    inputs: c.Buffer,
    place: c.Place,
    tile: c.Expr,
    tokens: Sequence[c.Expr],
    finish: Finish,
) -> None:
    """Multiply the rows of ``tile`` with ``tokens`` of ``inputs`` float32x4 [T, length / 4].

    ``finish(row, turn, values)`` is added for a thread of every row and token: ``turn`` is the
    token's number among ``tokens``, ``values`` one of each part.
    """
    row, part_of_row, _ = place.thread
    sums = [c.make_zeros(tiles.parts) for _ in tokens]
    with T.serial(-(-tiles.groups // SLICES)) as turn:
        group = c.let(turn * SLICES + part_of_row)
        with c.when(group < tiles.groups):
            _add_group(tiles, inputs, tile, group, row, tokens, sums)
    values = len(tokens) * tiles.parts
    shared = c.share(values * SLICES * ROWS)
    for index, cell in enumerate(cell for of_token in sums for cell in of_token):
        c.store(shared, (index * SLICES + part_of_row) * ROWS + row, cell.get())
    c.wait_for_group()
    with c.when(part_of_row < len(tokens)):
        results = []
        for part in range(tiles.parts):
            first = c.let((part_of_row * tiles.parts + part) * (SLICES * ROWS) + row)
            total = c.Cell(shared[first])
            for piece in range(1, SLICES):
                total.add(shared[first + piece * ROWS])
            results.append(total.get())
        finish(row, part_of_row, results)


def _add_group(
    tiles: Tiles,
    inputs: c.Buffer,
    tile: c.Expr,
    group: c.Expr,
    row: c.Expr,
    tokens: Sequence[c.Expr],
    sums: list[list[c.Cell]],
) -> None:
    """Add the products of a group of every part."""
    precision = tiles.weights.precision
    parts = range(tiles.parts)
    # All loads come first: they are under way together.
    words = [tiles.load_group(tile, part, group, row) for part in parts]
    scales = [tiles.load_scale(tile, part, group, row) for part in parts]
    found = [c.make_zeros(tiles.parts) for _ in tokens]
    firsts = [c.let(token * (tiles.length // 4) + group * (GROUP // 4)) for token in tokens]
    # As many words as hold whole vectors of 4 inputs.
    step = max(1, 4 // len(list_elements(precision, 0)))
    for start in range(0, WORDS[precision], step):
        span = range(start, start + step)
        elements = [element for word in span for element in list_elements(precision, word)]
        numbers = [
            [value for word in span for value in unpack_word(precision, words[part][word])]
            for part in parts
        ]
        for index in range(0, len(elements), 4):
            assert elements[index] % 4 == 0
            for first, row_sums in zip(firsts, found, strict=True):
                vector = c.let(inputs[first + elements[index] // 4])
                for lane in range(4):
                    value = c.let(c.take_lane(vector, lane))
                    for part in parts:
                        row_sums[part].add(numbers[part][index + lane] * value)
    for row_sums, totals in zip(found, sums, strict=True):
        for part in parts:
            totals[part].add(row_sums[part].get() * scales[part])
