"""Packed matrix times quantised activations, for one token or a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import (
    FLOAT_PLANES,
    LINE,
    Activations,
    Prefetch,
    Vector,
    emit_lane_order,
    list_runs,
)
from pi2.plan.weights.layout import (
    GROUP,
    Precision,
    round_up,
    scale_bytes,
    vector_bytes,
    weight_bytes,
)

LIMIT = {1: 127, 2: 127 * 256}
"""Largest code by number of planes."""


def emit_quantize(target: Activations, token: v.Expr) -> None:
    """Set codes, scales and sums of ``target`` from its values; only codes of floats."""
    if target.several is not None:
        with T.If(target.several):
            with T.Then():
                emit_quantize(target.for_chunk(), token)
            with T.Else():
                emit_quantize(target.for_one(), token)
        return
    if target.planes == FLOAT_PLANES:
        emit_lane_order(target, token)
        return
    for lanes, first, count in list_runs(target.length):
        with T.serial(count * target.once) as block, T.serial(lanes * target.once) as lane:
            _emit_group(target, token, v.let(first + block * lanes), lane, lanes)


def _emit_group(
    target: Activations, token: v.Expr, first: v.Expr, lane: v.Expr, lanes: int
) -> None:
    """Quantise group ``first + lane`` of the block of ``lanes`` that begins with ``first``."""
    length, planes = target.length, target.planes
    limit = LIMIT[planes]
    at = token * length + (first + lane) * GROUP
    halves = [v.let(v.load(target.values, at + half * 16, 16)) for half in range(2)]
    both = T.max(T.abs(halves[0]), T.abs(halves[1]))
    largest = v.let(v.find_largest(both, 16))
    zero = v.constant(0.0, "float32")
    # Subnormal maxima would make the factor infinite: they count as zero.
    tiny = largest < v.constant(1e-30, "float32")
    factor = v.let(T.Select(tiny, zero, v.constant(float(limit), "float32") / largest))
    scale = T.Select(tiny, zero, largest * v.constant(1.0 / limit, "float32"))
    codes = [v.let(v.cast(T.nearbyint(h * v.splat(factor, 16)), "int32", 16)) for h in halves]
    place = token * (length // GROUP) + first + lane
    v.store(target.scales, place, scale, 1)
    total = v.add_lanes(codes[0] + codes[1], "int32", 16)
    v.store(target.sums, place, total * v.constant(-8, "int32"), 1)
    if planes == 2:
        high = [
            v.let((c + v.constant(128, "int32", 16)) >> v.constant(8, "int32", 16)) for c in codes
        ]
        low = [c - (h << v.constant(8, "int32", 16)) for c, h in zip(codes, high, strict=True)]
        if target.upper_sums is not None:
            upper = v.add_lanes(high[0] + high[1], "int32", 16)
            v.store(target.upper_sums, place, upper * v.constant(-8, "int32"), 1)
        parts = [high, low]
    else:
        parts = [codes]
    scratch = T.alloc_buffer((32,), "int8")
    for plane, values in enumerate(parts):
        for half in range(2):
            v.store(scratch, half * 16, v.cast(values[half], "int8", 16), 16)
        for chunk in range(8):
            base = (token * planes + plane) * length + first * GROUP + chunk * 4 * lanes + lane * 4
            v.store(target.codes, base, v.load(scratch, chunk * 4, 4), 4)


ROW_TILE = 32
"""Rows that a thread takes through all tokens."""
PREFETCH_BYTES = 4096
"""How far ahead of the weights in use memory is asked for more."""
PARALLEL_BYTES = 256 << 10
"""Work that reads less than this is done by one thread: 20 us at 12 GB/s.  Starting and joining
threads takes 1 to 2 us on an idle machine and tens of microseconds on a busy one."""

Finish = Callable[[v.Expr, v.Expr, v.Expr], None]
"""Called with (token, row, dot product) to store the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A packed matrix in flat uint8 buffers: ``rows`` vectors, weights and scales apart."""

    weights: v.Buffer
    scales: v.Buffer
    rows: v.Expr | int
    length: int
    precision: Precision

    def take_row(self, row: v.Expr) -> Vector:
        wide = v.wide(row)
        return Vector(
            weights=self.weights,
            weights_base=v.let(wide * v.wide(weight_bytes(self.length, self.precision))),
            scales=self.scales,
            scales_base=v.let(wide * v.wide(scale_bytes(self.length, self.precision))),
            precision=self.precision,
        )


def emit_shared(count: v.Expr, read_bytes: v.Expr | int, emit: Callable[[v.Expr], None]) -> None:
    """Run ``emit`` for all tasks, in parallel if they read enough; the result is the same."""

    def emit_alone() -> None:
        with T.serial(count) as task:
            emit(task)

    def emit_parallel() -> None:
        with T.parallel(count) as task:
            emit(task)

    if isinstance(read_bytes, int):
        (emit_parallel if read_bytes >= PARALLEL_BYTES else emit_alone)()
        return
    with T.If(read_bytes >= PARALLEL_BYTES):
        with T.Then():
            emit_parallel()
        with T.Else():
            emit_alone()


def emit_split(thread: v.Expr, threads: int, count: v.Expr) -> tuple[v.Expr, v.Expr]:
    """Return the first item of ``thread`` and of the next thread, out of ``count``."""
    return (
        v.let(T.floordiv(count * thread, threads)),
        v.let(T.floordiv(count * (thread + 1), threads)),
    )


FinishItem = Callable[[v.Expr, v.Expr, list[v.Expr]], None]
"""Called with (token, item, dot product of each of the item's vectors) to store the result, which
may come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Items ``begin`` to ``end``, each of ``parts`` vectors: 1 (a row) or 2 (gate and up)."""

    begin: v.Expr
    end: v.Expr
    parts: int = 1
    most: int
    """Items that pass by all tokens."""
    take_vectors: Callable[[v.Expr], Sequence[Vector]]
    finish: FinishItem
    find_token: Callable[[v.Expr], v.Expr]
    """Returns the place of a token among the activations."""
    ask: Callable[[Sequence[Vector]], Prefetch] | None = None


def emit_items(isa: Isa, activations: Activations, tokens: v.Expr, items: Items) -> None:
    """vector . x of all items and tokens, a tile of both at a time."""
    together, parts = max(1, isa.tile_rows // items.parts), items.parts
    count = count_together(isa, activations.used_planes)

    def emit_tile(first: v.Expr, last: v.Expr, tokens: Sequence[v.Expr]) -> None:
        own = [v.let(T.min(first + index, last)) for index in range(together)]
        vectors = [vector for item in own for vector in items.take_vectors(item)]
        ask = None if items.ask is None else items.ask(vectors)
        places = [items.find_token(token) for token in tokens]
        dots = emit_dots(isa, vectors, activations, places, ask)
        for index, item in enumerate(own):
            rows = dots[index * parts : (index + 1) * parts]
            for turn, token in enumerate(tokens):
                items.finish(token, item, [v.let(row[turn]) for row in rows])

    with T.serial(T.floordiv(items.end - items.begin + items.most - 1, items.most)) as step:
        first = v.let(items.begin + step * items.most)
        last = v.let(T.min(first + items.most, items.end) - 1)
        with T.serial(T.floordiv(tokens + count - 1, count)) as tile:
            # The last token of all stands for those beyond it, and the last item.
            named = [v.let(T.min(tile * count + index, tokens - 1)) for index in range(count)]
            with T.serial(T.floordiv(last - first + together, together)) as turn:
                emit_tile(v.let(first + turn * together), last, named)


def count_together(isa: Isa, planes: int) -> int:
    """Return how many tokens of activations of ``planes`` are multiplied together."""
    # With one plane instead of two, the registers hold the sums of twice as many tokens.
    return isa.tile_tokens * (2 if planes == 1 else 1)


def emit_multiply(
    isa: Isa,
    threads: int,
    matrix: Matrix,
    activations: Activations,
    tokens: tuple[v.Expr, v.Expr | int],
    finish: Finish,
) -> None:
    """matrix . x of a few ``tokens``, the first and their number; threads share the rows."""
    (origin, count), level = tokens, isa.prefetch_level

    def ask_ahead(vectors: Sequence[Vector], ahead: int) -> Prefetch:
        """Return what asks for the weights that lie ``ahead`` bytes ahead, at their pace."""

        def ask(index: int, byte: v.Expr, size: int) -> None:
            vector = vectors[index]
            for line in range(0, size, LINE):
                v.prefetch(vector.weights, vector.weights_base + byte + ahead + line, level)

        return ask

    def emit_single(thread: v.Expr) -> None:
        begin, end = emit_split(thread, threads, matrix.rows)
        with T.serial(end - begin) as step:
            row = v.let(begin + step)
            vectors = [matrix.take_row(row)]
            ask = ask_ahead(vectors, PREFETCH_BYTES)
            dots = emit_dots(isa, vectors, activations.for_one(), [origin], ask)
            finish(T.int32(0), row, dots[0][0])

    def emit_several(thread: v.Expr) -> None:
        chunk = activations.for_chunk()
        # Weights come from memory faster than they are computed with: loops are as fast.
        tile = replace(isa, unrolls=False)
        if isa.dot != "vnni":
            emit_tiles(tile, chunk, thread)
            return
        # Twice as many tokens share the unpacking: four rows by four tokens are too many sums.
        half = replace(tile, tile_rows=isa.tile_rows // 2)
        with T.If(count > count_together(isa, chunk.used_planes)):
            with T.Then():
                emit_tiles(replace(half, tile_tokens=2 * isa.tile_tokens), chunk, thread)
            with T.Else():
                emit_tiles(half if chunk.upper else tile, chunk, thread)

    def emit_tiles(tile: Isa, chunk: Activations, thread: v.Expr) -> None:
        begin, end = emit_split(thread, threads, matrix.rows)
        # Beyond the rows that are read together, which lie side by side.
        together = tile.tile_rows * weight_bytes(matrix.length, matrix.precision)
        ahead = round_up(PREFETCH_BYTES, together)
        items = Items(
            begin=begin,
            end=end,
            most=ROW_TILE,
            take_vectors=lambda row: [matrix.take_row(row)],
            finish=lambda token, row, dots: finish(token, row, dots[0]),
            find_token=lambda token: token + origin,
            ask=lambda vectors: ask_ahead(vectors, ahead),
        )
        emit_items(tile, chunk, count, items)

    # The number of rows may be a parameter: then 64 bits, as it is multiplied.
    size = vector_bytes(matrix.length, matrix.precision)
    rows = matrix.rows
    read_bytes = rows * size if isinstance(rows, int) else v.wide(rows) * size
    if isinstance(count, int):
        assert count == 1
        emit_shared(threads, read_bytes, emit_single)
        return
    with T.If(count == 1):
        with T.Then():
            emit_shared(threads, read_bytes, emit_single)
        with T.Else():
            emit_shared(threads, PARALLEL_BYTES, emit_several)
