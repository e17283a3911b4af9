"""Packed matrix times quantised activations, for one token or a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.amx import emit_block_items, emit_blocks, has_many, takes_blocks
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.i8mm import emit_items, place_scale, place_steps, takes_pairs
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import (
    FLOAT_PLANES,
    LINE,
    Activations,
    Items,
    Prefetch,
    Vector,
    emit_lane_order,
    emit_request,
    list_runs,
)
from pi2.formats import find_packing
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
    v.store(
        target.scales,
        place_scale(target, token, first + lane) if target.paired else place,
        scale,
        1,
    )
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
        if target.paired:
            for step, base in enumerate(place_steps(target, token, plane, first + lane)):
                v.store(target.codes, base, v.load(scratch, step * 8, 8), 8)
            continue
        for chunk in range(8):
            base = (token * planes + plane) * length + first * GROUP + chunk * 4 * lanes + lane * 4
            v.store(target.codes, base, v.load(scratch, chunk * 4, 4), 4)


ROW_TILE, MOST_ROWS = 32, 128
"""Rows that a thread takes through all tokens, at least; at most, if these are a chunk's."""
ROW_TILE_BYTES = 256 << 10
"""Bytes of more than `ROW_TILE` rows: they stay in the second-level cache, and the more of them
there are, the less often the tokens' activations come from beyond it."""
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
        if read_bytes >= PARALLEL_BYTES and not (isinstance(count, int) and count == 1):
            emit_parallel()
        else:
            emit_alone()
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


def emit_multiply(
    isa: Isa,
    threads: int,
    matrix: Matrix,
    activations: Activations,
    tokens: v.Expr | None,
    finish: Finish,
    first: v.Expr | None = None,
) -> None:
    """matrix . x of ``tokens`` tokens (None: of one) from ``first`` on, rows in parallel."""
    origin = T.int32(0) if first is None else first

    def emit_single(thread: v.Expr) -> None:
        begin, end = emit_split(thread, threads, matrix.rows)
        with T.serial(end - begin) as step:
            row = v.let(begin + step)
            emit_row(isa, matrix.take_row(row), activations.for_one(), origin, row, finish)

    def list_items(begin: v.Expr, end: v.Expr) -> Items:
        return Items(
            begin=begin,
            end=end,
            take_vectors=lambda row: [matrix.take_row(row)],
            finish=lambda token, row, dots: finish(token, row, dots[0]),
        )

    def emit_several(thread: v.Expr) -> None:
        assert tokens is not None
        begin, end = emit_split(thread, threads, matrix.rows)
        if takes_pairs(isa, matrix.precision):
            emit_items(activations.for_chunk(), tokens, thread, list_items(begin, end))
            return
        chunk = activations.for_chunk()
        wide = isa.widen_few()
        if wide is None:
            of_values = find_packing(matrix.precision).meets_values
            emit_tiles(isa.shape_tile(chunk.used_planes, of_values=of_values), begin, end)
            return
        # Four rows by four tokens are too many sums, of one plane too.
        narrow = replace(isa, tile_rows=wide.tile_rows) if chunk.upper else isa
        with T.If(tokens > count_together(isa, chunk.used_planes)):
            with T.Then():
                emit_tiles(wide, begin, end)
            with T.Else():
                emit_tiles(narrow, begin, end)

    def emit_blocked(thread: v.Expr) -> None:
        assert tokens is not None
        begin, end = emit_split(thread, threads, matrix.rows)
        emit_block_items(activations.for_chunk(), tokens, thread, list_items(begin, end))

    def emit_many() -> None:
        assert tokens is not None
        chunk = activations.for_chunk()
        if first is not None or not takes_blocks(isa, chunk, matrix.precision):
            emit_shared(threads, PARALLEL_BYTES, emit_several)
            return
        with T.If(has_many(chunk, tokens)):
            with T.Then():
                emit_blocks(chunk, tokens)
                emit_shared(threads, PARALLEL_BYTES, emit_blocked)
            with T.Else():
                emit_shared(threads, PARALLEL_BYTES, emit_several)

    def emit_tiles(own: Isa, begin: v.Expr, end: v.Expr) -> None:
        height = ROW_TILE if own.few_tokens else count_rows(matrix)
        with T.serial(T.floordiv(end - begin + height - 1, height)) as tile:
            emit_row_tile(
                own,
                matrix,
                (v.let(begin + tile * height), v.let(T.min(begin + (tile + 1) * height, end))),
                activations.for_chunk(),
                tokens,
                finish,
                first,
            )

    # The number of rows may be a parameter: then 64 bits, as it is multiplied.
    size = vector_bytes(matrix.length, matrix.precision)
    rows = matrix.rows
    read_bytes = rows * size if isinstance(rows, int) else v.wide(rows) * size
    if tokens is None:
        emit_shared(threads, read_bytes, emit_single)
        return
    with T.If(tokens == 1):
        with T.Then():
            emit_shared(threads, read_bytes, emit_single)
        with T.Else():
            emit_many()


def count_rows(matrix: Matrix) -> int:
    """Return how many rows a thread takes through all tokens of a chunk."""
    most = ROW_TILE_BYTES // weight_bytes(matrix.length, matrix.precision)
    return max(ROW_TILE, min(most, MOST_ROWS))


def emit_row(
    isa: Isa, vector: Vector, activations: Activations, origin: v.Expr, row: v.Expr, finish: Finish
) -> None:
    """Compute a row for token 0 with the activations of ``origin``, prefetching ahead."""

    dots = emit_dots(isa, [vector], activations, [origin], _ask_ahead([vector], PREFETCH_BYTES))
    finish(T.int32(0), row, dots[0][0])


def emit_row_tile(
    isa: Isa,
    matrix: Matrix,
    rows: tuple[v.Expr, v.Expr],
    activations: Activations,
    tokens: v.Expr,
    finish: Finish,
    origin: v.Expr | None = None,
) -> None:
    """Compute rows from the first to the second of ``rows`` for all tokens, a tile of both at a
    time; theirs begin at ``origin`` among the activations."""
    begin, end = rows

    # Beyond the rows that are read together, which lie side by side.
    ahead = round_up(PREFETCH_BYTES, isa.tile_rows * weight_bytes(matrix.length, matrix.precision))

    def emit_tile(first: v.Expr, named: list[v.Expr]) -> None:
        with T.serial(T.floordiv(end - begin + isa.tile_rows - 1, isa.tile_rows)) as step:
            top = v.let(begin + step * isa.tile_rows)
            # The last tile repeats the last row, and finishes it once.
            own = [v.let(T.min(top + index, end - 1)) for index in range(isa.tile_rows)]
            places = named if origin is None else [token + origin for token in named]
            vectors = [matrix.take_row(row) for row in own]
            ask = None
            if isa.few_tokens:
                ask = _ask_ahead(vectors, ahead)
            else:
                later = [v.let(T.min(row + count_rows(matrix), matrix.rows - 1)) for row in own]
                turn = v.let(T.floordiv(first, len(named)))
                emit_request([matrix.take_row(row) for row in later], matrix.length, turn)
            dots = emit_dots(isa, vectors, activations, places, ask)
            for offset, row in enumerate(own):
                with T.If(top + offset < end), T.Then():
                    for index, token in enumerate(named):
                        with T.If(first + index < tokens), T.Then():
                            finish(token, row, dots[offset][index])

    emit_token_tiles(isa, activations.used_planes, tokens, emit_tile)


def _ask_ahead(vectors: list[Vector], ahead: int) -> Prefetch:
    """Return what asks for the weights that lie ``ahead`` bytes ahead, at their pace."""

    def ask(index: int, byte: v.Expr, size: int) -> None:
        vector = vectors[index]
        for line in range(0, size, LINE):
            v.prefetch(vector.weights, vector.weights_base + byte + ahead + line)

    return ask


def emit_token_tiles(
    isa: Isa, planes: int, tokens: v.Expr, emit: Callable[[v.Expr, list[v.Expr]], None]
) -> None:
    """Call ``emit(first, tokens of the tile)`` for all tiles; the last repeats the last token."""
    together = count_together(isa, planes)
    with T.serial(T.floordiv(tokens + together - 1, together)) as tile:
        first = v.let(tile * together)
        emit(first, [v.let(T.min(first + index, tokens - 1)) for index in range(together)])


def count_together(isa: Isa, planes: int) -> int:
    """Return how many tokens of activations of ``planes`` are multiplied together."""
    # With one plane instead of two, the registers hold the sums of twice as many tokens.
    return isa.tile_tokens * (2 if planes == 1 else 1)
