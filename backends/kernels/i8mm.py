"""Several tokens with the matrix instruction of ARM's ``i8mm``: ``smmla``.

``smmla`` multiplies 2 rows of 8 weights with 2 tokens of 8 activations: 32 products, where ``sdot``
makes 16.  It wants 8 elements of one group side by side; a packed vector
(`pi2.plan.weights.layout`) has 4 of each of several groups.  So both sides are brought into its
order beforehand, and the inner loop is nothing but loads and multiplications:

- Tokens, once, when they are quantised (`quantize`): ``codes`` int8 [tokens / 2, planes, groups, 4,
  2, 8], four steps of 8 elements of a group, in each both tokens of the pair, in natural order;
  ``scales`` float32 [tokens / 2, groups, 2].  Arrays hold an even number of tokens; what stands for
  the last of an odd number is computed with and never used.
- Weights, once for all tokens of a chunk: `ROWS` vectors are unpacked into ``tiles``, a thread's
  scratch that stays in the first-level cache.  Per group: int8 [4, ROWS / 2, 2, 8], the same four
  steps, in each all pairs of rows; then float32 [ROWS / 2, 4], both scales of a pair, each twice.

Weights are signed here, so that no offset is taken out afterwards.  The integer sum of a group is
exact, as with every other schedule; groups are added in their order.

Source: Arm Architecture Reference Manual (DDI 0487), SMMLA (vector)."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import PAIRED_GROUP_BYTES as GROUP_BYTES
from pi2.backends.kernels.isa import PAIRED_ROWS as ROWS
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import EVERYTHING, Activations, Chosen, Items, Vector, list_runs
from pi2.backends.kernels.unpacking import find_unpacking
from pi2.plan.weights.layout import GROUP, Precision

TOKENS = 4
"""Tokens that `ROWS` rows are multiplied with at once: 8 integer sums, 8 float sums and the loaded
operands nearly fill the 32 registers."""
STEPS = 4
"""Steps of 8 elements in a group."""
_CODE_BYTES = GROUP * ROWS


def emit_smmla(total: v.Expr, weights: v.Expr, codes: v.Expr) -> v.Expr:
    """Return int32x4 ``total`` plus [row 0 . token 0, 0 . 1, 1 . 0, 1 . 1] of int8x16 each."""
    return T.call_llvm_pure_intrin(
        "int32x4", "llvm.aarch64.neon.smmla.v4i32.v16i8", total, weights, codes
    )


def takes_pairs(isa: Isa, precision: Precision) -> bool:
    """Return whether several tokens are multiplied with weights of a precision in this way."""
    return isa.pairs and not find_unpacking(precision).packing.meets_values


def emit_items(
    activations: Activations,
    tokens: v.Expr,
    thread: v.Expr,
    given: Items,
    chosen: Chosen = EVERYTHING,
    *,
    is_pair: bool = False,
) -> None:
    """vector . x for items and ``tokens``, or those ``chosen``; ``is_pair``: at most 2 tokens."""
    begin, end, parts = given.begin, given.end, given.parts
    take_vectors, finish = given.take_vectors, given.finish
    base = v.let(v.wide(thread) * (activations.length // GROUP * GROUP_BYTES))
    together = ROWS // parts
    with T.serial(T.floordiv(end - begin + together - 1, together)) as step:
        top = v.let(begin + step * together)
        with T.serial(ROWS // 2 * activations.once) as pair:
            # The last tile repeats the last item.
            named = [
                v.let(T.min(top + pair * (2 // parts) + turn, end - 1))
                for turn in range(2 // parts)
            ]
            vectors = [vector for item in named for vector in take_vectors(item)]
            _emit_unpacked_pair(vectors, activations, base, pair)
        items = v.let(T.min(end - top, together))
        with T.serial(T.floordiv(tokens + TOKENS - 1, TOKENS)) as tile:
            first = v.let(tile * TOKENS)
            sums = T.alloc_buffer((ROWS * TOKENS,), "float32")
            if is_pair:
                _emit_tile(activations, chosen, first, 1, base, sums)
            else:
                with T.If(tokens - first > TOKENS // 2):
                    with T.Then():
                        _emit_tile(activations, chosen, first, TOKENS // 2, base, sums)
                    with T.Else():
                        _emit_tile(activations, chosen, first, 1, base, sums)
            with T.serial(items) as item, T.serial(T.min(tokens - first, TOKENS)) as token:
                dots = [
                    v.let(sums[(item * parts + part) * TOKENS + token]) for part in range(parts)
                ]
                finish(v.let(first + token), v.let(top + item), dots)


def place_steps(activations: Activations, token: v.Expr, plane: int, group: v.Expr) -> list[v.Expr]:
    """Return where a token's codes of a group stand, by steps of 8 elements."""
    pair = T.floordiv(token, 2) * activations.planes + plane
    base = v.let(pair * (2 * activations.length) + group * (2 * GROUP) + T.floormod(token, 2) * 8)
    return [base + step * 16 for step in range(STEPS)]


def place_scale(activations: Activations, token: v.Expr, group: v.Expr) -> v.Expr:
    pair = T.floordiv(token, 2) * (activations.length // GROUP)
    return (pair + group) * 2 + T.floormod(token, 2)


def _emit_tile(
    activations: Activations,
    chosen: Chosen,
    first: v.Expr,
    count: int,
    base: v.Expr,
    sums: v.Buffer,
) -> None:
    """Set ``sums`` float32 [ROWS, TOKENS] to the products of the unpacked rows and ``count`` pairs
    of tokens from ``first`` on."""
    tiles, length, planes = activations.tiles, activations.length, activations.planes
    groups = length // GROUP
    pairs = [v.let(T.floordiv(chosen.find_token(first + 2 * turn), 2)) for turn in range(count)]
    starts = [v.let(v.wide(pair) * (2 * planes * length)) for pair in pairs]
    rows = range(ROWS // 2)
    totals = [[v.Cell(v.constant(0.0, "float32", 4)) for _ in pairs] for _ in rows]
    with T.serial(v.wide(groups * activations.once)) as group:
        weights = v.let(base + group * GROUP_BYTES)
        cells = [[v.Cell(v.constant(0, "int32", 4)) for _ in pairs] for _ in rows]
        for plane in range(planes):
            at = weights
            if plane and count > 1:
                # Plus 0, which LLVM does not know: it would keep 16 registers of weights for the
                # second plane, and write sums to the stack instead.
                at = v.let(weights + (activations.once >> 1))
            for step in range(STEPS):
                shift = (plane * groups * STEPS + step) * 16
                codes = [
                    v.let(v.load(activations.codes, start + group * (2 * GROUP) + shift, 16))
                    for start in starts
                ]
                for row in rows:
                    place = at + (step * (ROWS // 2) + row) * 16
                    unpacked = v.let(v.load(tiles, place, 16))
                    for cell, code in zip(cells[row], codes, strict=True):
                        cell.set(emit_smmla(cell.get(), unpacked, code))
            if plane + 1 < planes:
                # 256 high + low, in one sum.
                for row in rows:
                    for cell in cells[row]:
                        cell.set(cell.get() << v.constant(8, "int32", 4))
        scales = [_load_pair_scale(activations, pair, group, groups) for pair in pairs]
        for row in rows:
            weight_scale = v.let(
                v.reinterpret(v.load(tiles, weights + _CODE_BYTES + row * 16, 16), "float32", 4)
            )
            for total, cell, scale in zip(totals[row], cells[row], scales, strict=True):
                part = v.cast(cell.get(), "float32", 4)
                total.set(T.fma(part, weight_scale * scale, total.get()))
    for row in rows:
        for turn, total in enumerate(totals[row]):
            value = v.let(total.get())
            for half, take in enumerate((v.low_half, v.high_half)):
                place = (2 * row + half) * TOKENS + 2 * turn
                v.store(sums, place, take(value, "float32", 4), 2)


def _load_pair_scale(activations: Activations, pair: v.Expr, group: v.Expr, groups: int) -> v.Expr:
    """Return the scales of a group of two tokens, [0, 1, 0, 1]."""
    both = v.let(v.load(activations.scales, (v.wide(pair) * groups + group) * 2, 2))
    return v.let(Shuffle([both, both], [0, 1, 2, 3]))


def _emit_unpacked_pair(
    vectors: Sequence[Vector], activations: Activations, base: v.Expr, pair: v.Expr
) -> None:
    """Unpack two vectors, with their scales, to their places in ``activations.tiles``."""
    for lanes, first, count in list_runs(activations.length):
        width = min(lanes, 4)
        with T.serial(v.wide(count * activations.once)) as block:
            group = v.let(first + block * lanes)
            with T.serial(v.wide(lanes // width * activations.once)) as quarter:
                place = v.let(base + (group + quarter * width) * GROUP_BYTES + pair * 16)
                _emit_unpacked_groups(
                    vectors, activations.tiles, place, group, quarter, lanes, width
                )


def _emit_unpacked_groups(
    vectors: Sequence[Vector],
    tiles: v.Buffer,
    place: v.Expr,
    group: v.Expr,
    quarter: v.Expr,
    lanes: int,
    width: int,
) -> None:
    """Unpack ``width`` groups, from ``quarter * width`` of the block that begins with ``group``."""
    unpacking = find_unpacking(vectors[0].precision)

    def put(index: int, step: int, weights: v.Expr) -> None:
        at = place + (index * GROUP_BYTES + step * (ROWS // 2) * 16)
        v.store(tiles, at, weights, 16)

    for half in range(unpacking.chunks // 2):
        columns = []
        for vector in vectors:
            byte = vector.weights_base + group * unpacking.group_bytes + quarter * (4 * width)
            chunks = [
                v.let(
                    v.load_as(vector.weights, byte + (2 * half + turn) * 4 * lanes, "int32", width)
                )
                for turn in range(2)
            ]
            columns.append(_interleave(chunks, width))
        for index in range(width):
            words = v.let(_join_rows(columns, index, width))
            for chunk, numbers in unpacking.split_words(True, words, 2 * half, 4):
                put(index, chunk // 2, numbers)
    scales = [v.let(unpacking.load_scales(x, group + quarter * width, width)) for x in vectors]
    for index in range(width):
        pairs = [v.take_lane(scale, index) if width > 1 else scale for scale in scales]
        four = Shuffle([pairs[0], pairs[0], pairs[1], pairs[1]], [0, 1, 2, 3])
        at = place + (index * GROUP_BYTES + _CODE_BYTES)
        v.store(tiles, at, v.reinterpret(four, "int8", 16), 16)


def _interleave(chunks: Sequence[v.Expr], width: int) -> list[v.Expr]:
    """Return [a0, b0, a1, b1, ...] of two int32 x ``width``, in vectors of at most 4 lanes."""
    if width == 4:
        orders = [[0, 4, 1, 5], [2, 6, 3, 7]]
    else:
        orders = [[0, 2, 1, 3]] if width == 2 else [[0, 1]]
    return [v.let(Shuffle(list(chunks), order)) for order in orders]


def _join_rows(columns: Sequence[Sequence[v.Expr]], index: int, width: int) -> v.Expr:
    """Return the two words of group ``index`` of the first row, then the second row's."""
    rows = [column[index // 2] for column in columns]
    if width == 1:
        return Shuffle(rows, [0, 1, 2, 3])
    return Shuffle(rows, [2, 3, 6, 7] if index % 2 else [0, 1, 4, 5])
