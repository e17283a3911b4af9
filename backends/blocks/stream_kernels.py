"""Residual streams that predict each other, are mixed or gated: kernels of `AltUp`, `Hyper`,
`GatedStreams` and `Ngrams`.  Items are tokens unless others are named."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.elements import add_squares, add_up, split_item, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.compiler import vectors as v
from pi2.plan.documents.model_mixing import SMALLEST_SQUARE
from pi2.plan.documents.model_parts import SMALLEST_PRODUCT


def _find_factor(table: Table, token: v.Expr, number: v.Expr) -> v.Expr:
    return v.let(table.factors[token * table.factors_stride + number])


def emit_predict(table: Table) -> None:
    """Stream b of y = stream b of x + the sum of all streams a of x, times factor [b, a]."""
    with T.serial(table.first, table.end) as token:
        start = v.let(token * table.stride)
        with T.serial(table.count) as stream:
            target = v.let(start + stream * table.length)

            def copy(place: v.Expr, lanes: int) -> None:
                v.store(table.y, target + place, v.load(table.x, target + place, lanes), lanes)

            walk(T.int64(0), table.length, copy)
            with T.serial(table.count) as other:
                factor = _find_factor(table, token, stream * table.count + other)
                source = v.let(start + other * table.length)

                def add(place: v.Expr, lanes: int) -> None:
                    old = v.load(table.y, target + place, lanes)
                    value = v.load(table.x, source + place, lanes)
                    v.store(
                        table.y, target + place, T.fma(value, v.splat(factor, lanes), old), lanes
                    )

                walk(T.int64(0), table.length, add)


def emit_correct(table: Table) -> None:
    """Stream b of x = stream b of y + (1 + factor [b]) times what stream 0 of x has changed since
    y."""
    with T.serial(table.first, table.end) as token:
        start = v.let(token * table.stride)
        with T.serial(table.count) as number:
            # The first stream comes last: others are changed by it.
            stream = v.let(table.count - 1 - number)
            target = v.let(start + stream * table.length)
            factor = v.let(_find_factor(table, token, stream) + T.float32(1.0))

            def correct(place: v.Expr, lanes: int) -> None:
                before = v.load(table.y, start + place, lanes)
                change = v.let(v.load(table.x, start + place, lanes) - before)
                old = v.load(table.y, target + place, lanes)
                v.store(table.x, target + place, T.fma(change, v.splat(factor, lanes), old), lanes)

            walk(T.int64(0), table.length, correct)


def emit_match(table: Table) -> None:
    """Give every stream of y the root mean square of x."""
    with T.serial(table.first, table.end) as token:
        wanted = _measure(table.x, v.let(token * table.x_stride), table.length)
        with T.serial(table.count) as stream:
            start = v.let(token * table.stride + stream * table.length)
            found = T.max(_measure(table.y, start, table.length), T.float32(SMALLEST_SQUARE))
            factor = v.let(T.sqrt(wanted / found))

            def scale(place: v.Expr, lanes: int) -> None:
                value = v.load(table.y, start + place, lanes) * v.splat(factor, lanes)
                v.store(table.y, start + place, value, lanes)

            walk(T.int64(0), table.length, scale)


def _measure(x: v.Buffer, start: v.Expr, length: v.Expr) -> v.Expr:
    """Return the mean square of ``length`` elements."""
    return v.let(add_squares(x, start, length) / T.cast(length, "float32"))


def emit_mix(table: Table) -> None:
    """Make factors for `predict` of a projection x [count (count + 2)].  With ``read`` the stream
    behind ``count`` others becomes an operator's input, with ``kept`` they take its output from
    there (`pi2.plan.documents.model_mixing.Hyper`)."""
    one = T.float32(1.0)
    side = v.let(table.count + 1)

    def put(target: v.Buffer, place: v.Expr, value: v.Expr) -> None:
        T.buffer_store(target, value, [v.let(place)])

    with T.serial(table.first, table.end) as token:
        source = v.let(token * table.x_stride)
        first, second = v.let(token * table.read_stride), v.let(token * table.kept_stride)

        def find(part: int, number: v.Expr) -> v.Expr:
            return v.let(
                table.x[source + number] * table.scales[T.int64(part)] + table.bias[number]
            )

        # Rows are sources here: column j of C is row j of the factors, less the stream itself.
        def place_of(source_stream: v.Expr, target_stream: v.Expr) -> v.Expr:
            return v.let(second + target_stream * side + source_stream)

        def divide(stride: v.Expr, start: v.Expr) -> None:
            total = v.Cell(table.epsilon)
            with T.serial(table.count) as k:
                total.set(total.get() + table.kept[start + k * stride])
            factor = v.let(one / total.get())
            with T.serial(table.count) as k:
                at = v.let(start + k * stride)
                put(table.kept, at, table.kept[at] * factor)

        with T.serial(side * side) as place:
            put(table.read, first + place, T.float32(0.0))
        put(table.read, first + side * side - 1, T.float32(-1.0))
        with T.serial(table.count) as stream:
            own = v.let(v.take_sigmoid(find(0, stream), 1) + table.epsilon)
            put(table.read, first + table.count * side + stream, own)
            given = v.let(v.take_sigmoid(find(1, v.let(table.count + stream)), 1))
            put(table.kept, place_of(table.count, stream), given + given)
            put(table.kept, place_of(stream, table.count), T.float32(0.0))
            start = v.let((stream + 2) * table.count)
            most = v.Cell(find(2, start))
            with T.serial(table.count) as other:
                most.set(T.max(most.get(), find(2, v.let(start + other))))
            total = v.Cell(T.float32(0.0))
            with T.serial(table.count) as other:
                value = v.let(v.take_exponential(find(2, v.let(start + other)) - most.get(), 1))
                put(table.kept, place_of(stream, other), value)
                total.set(total.get() + value)
            factor = v.let(one / total.get())
            with T.serial(table.count) as other:
                at = place_of(stream, other)
                put(table.kept, at, table.kept[at] * factor + table.epsilon)
        put(table.kept, second + side * side - 1, T.float32(0.0))
        with T.serial(table.rounds) as turn:
            with T.If(turn > T.int64(0)), T.Then(), T.serial(table.count) as stream:
                divide(side, v.let(second + stream))
            with T.serial(table.count) as stream:
                divide(T.int64(1), v.let(second + stream * side))
        with T.serial(table.count) as stream:
            at = place_of(stream, stream)
            put(table.kept, at, table.kept[at] - one)


def emit_collapse(table: Table) -> None:
    """``y`` = the mean of ``count`` streams of x, times sigmoid(gates): items are pieces."""
    strides = table.x_stride, table.gates_stride, table.y_stride
    factor = v.let(T.float32(1.0) / T.cast(table.count, "float32"))
    with T.serial(table.first, table.end) as item:
        token, first, end = split_item(item, table.length)
        source, gate, target = (v.let(token * stride) for stride in strides)

        def emit(place: v.Expr, lanes: int) -> None:
            total = v.Cell(v.constant(0.0, "float32", lanes))
            with T.serial(table.count) as stream:
                at = v.let(stream * table.length + place)
                own = v.take_sigmoid(v.let(v.load(table.gates, gate + at, lanes)), lanes)
                total.set(T.fma(v.load(table.x, source + at, lanes), own, total.get()))
            v.store(table.y, target + place, total.get() * v.splat(factor, lanes), lanes)

        walk(first, end, emit)


def emit_inject(table: Table) -> None:
    """Add x to each of ``count`` streams of y, times 2 sigmoid(weight of the stream)."""
    strides = table.x_stride, table.y_stride, table.weights_stride
    with T.serial(table.first, table.end) as token:
        source, start, given = (v.let(token * stride) for stride in strides)
        with T.serial(table.count) as stream:
            own = v.let(v.take_sigmoid(v.let(table.weights[given + stream]), 1))
            factor, target = v.let(own + own), v.let(start + stream * table.length)

            def add(place: v.Expr, lanes: int) -> None:
                old, value = (
                    v.load(table.y, target + place, lanes),
                    v.load(table.x, source + place, lanes),
                )
                v.store(table.y, target + place, T.fma(value, v.splat(factor, lanes), old), lanes)

            walk(T.int64(0), table.length, add)


def emit_admit(table: Table) -> None:
    """Stream j of y = values times sigmoid(s): s is the root of |keys[j] queries[j]| /
    sqrt(length), with the product's sign.  Items are streams of tokens."""
    strides = table.keys_stride, table.queries_stride, table.values_stride, table.y_stride
    zero = T.int64(0)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.count)
        skip = v.let((item - token * table.count) * table.length)
        key, query, value, target = (v.let(token * stride) for stride in strides)

        def multiply(place: v.Expr, lanes: int) -> v.Expr:
            at = v.let(skip + place)
            return v.load(table.keys, key + at, lanes) * v.load(table.queries, query + at, lanes)

        product = add_up(zero, table.length, multiply)
        size = v.let(product / T.sqrt(T.cast(table.length, "float32")))
        root = v.let(T.sqrt(T.max(T.abs(size), T.float32(SMALLEST_PRODUCT))))
        signed = v.Cell(root)
        with T.If(size < T.float32(0.0)), T.Then():
            signed.set(T.float32(0.0) - root)
        with T.If(size == T.float32(0.0)), T.Then():
            signed.set(T.float32(0.0))
        factor = v.let(v.take_sigmoid(v.let(signed.get()), 1))

        def scale(place: v.Expr, lanes: int) -> None:
            own = v.load(table.values, value + place, lanes) * v.splat(factor, lanes)
            v.store(table.y, target + skip + place, own, lanes)

        walk(zero, table.length, scale)
