"""Residual streams that predict each other, are mixed or gated: kernels of `AltUp`, `Hyper`,
`GatedStreams` and `Ngrams`.  Items are tokens unless others are named."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.elements import add_up, split_item, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.compiler import vectors as v
from pi2.plan.documents.model_mixing import SMALLEST_SQUARE
from pi2.plan.documents.model_parts import SMALLEST_PRODUCT


class _Streams:
    """Arguments: x and y have ``count`` streams of a token one after the other."""

    def __init__(self, table: Table) -> None:
        self.x, self.y = table.take_array("x", "float32"), table.take_array("y", "float32")
        self.length, self.count = table.take("length"), table.take("count")
        self.stride = table.take("stride")
        self._factors = table.take_array("factors", "float32")
        self._factor_stride = table.take("factors_stride")

    def find_factor(self, token: v.Expr, number: v.Expr) -> v.Expr:
        return v.let(self._factors[token * self._factor_stride + number])


def emit_predict(table: Table) -> None:
    """Stream b of y = stream b of x + the sum of all streams a of x, times factor [b, a]."""
    own = _Streams(table)
    with T.serial(table.first, table.end) as token:
        start = v.let(token * own.stride)
        with T.serial(own.count) as stream:
            target = v.let(start + stream * own.length)

            def copy(place: v.Expr, lanes: int, target: v.Expr = target) -> None:
                v.store(own.y, target + place, v.load(own.x, target + place, lanes), lanes)

            walk(T.int64(0), own.length, copy)
            with T.serial(own.count) as other:
                factor = own.find_factor(token, stream * own.count + other)
                source = v.let(start + other * own.length)

                def add(
                    place: v.Expr,
                    lanes: int,
                    target: v.Expr = target,
                    source: v.Expr = source,
                    factor: v.Expr = factor,
                ) -> None:
                    old = v.load(own.y, target + place, lanes)
                    value = v.load(own.x, source + place, lanes)
                    v.store(own.y, target + place, T.fma(value, v.splat(factor, lanes), old), lanes)

                walk(T.int64(0), own.length, add)


def emit_correct(table: Table) -> None:
    """Stream b of x = stream b of y + (1 + factor [b]) times what stream 0 of x has changed since
    y."""
    own = _Streams(table)
    with T.serial(table.first, table.end) as token:
        start = v.let(token * own.stride)
        with T.serial(own.count) as number:
            # The first stream comes last: others are changed by it.
            stream = v.let(own.count - 1 - number)
            target = v.let(start + stream * own.length)
            factor = v.let(own.find_factor(token, stream) + T.float32(1.0))

            def correct(
                place: v.Expr, lanes: int, target: v.Expr = target, factor: v.Expr = factor
            ) -> None:
                before = v.load(own.y, start + place, lanes)
                change = v.let(v.load(own.x, start + place, lanes) - before)
                old = v.load(own.y, target + place, lanes)
                v.store(own.x, target + place, T.fma(change, v.splat(factor, lanes), old), lanes)

            walk(T.int64(0), own.length, correct)


def emit_match(table: Table) -> None:
    """Give every stream of y the root mean square of x."""
    own = _Streams(table)
    x_stride = table.take("x_stride")
    with T.serial(table.first, table.end) as token:
        wanted = _measure(own.x, v.let(token * x_stride), own.length)
        with T.serial(own.count) as stream:
            start = v.let(token * own.stride + stream * own.length)
            found = T.max(_measure(own.y, start, own.length), T.float32(SMALLEST_SQUARE))
            factor = v.let(T.sqrt(wanted / found))

            def scale(
                place: v.Expr, lanes: int, start: v.Expr = start, factor: v.Expr = factor
            ) -> None:
                value = v.load(own.y, start + place, lanes) * v.splat(factor, lanes)
                v.store(own.y, start + place, value, lanes)

            walk(T.int64(0), own.length, scale)


def _measure(x: v.Buffer, start: v.Expr, length: v.Expr) -> v.Expr:
    """Return the mean square of ``length`` elements."""

    def square(place: v.Expr, lanes: int) -> v.Expr:
        value = v.let(v.load(x, start + place, lanes))
        return value * value

    return v.let(add_up(T.int64(0), length, square) / T.cast(length, "float32"))


def emit_mix(table: Table) -> None:
    """Make factors for `predict` of a projection x [count (count + 2)].  With ``read`` the stream
    behind ``count`` others becomes an operator's input, with ``kept`` they take its output from
    there (`pi2.plan.documents.model_mixing.Hyper`)."""
    x, read, kept = (table.take_array(name, "float32") for name in ("x", "read", "kept"))
    scales, bias = table.take_array("scales", "float32"), table.take_array("bias", "float32")
    count, rounds = table.take("count"), table.take("rounds")
    epsilon, one = table.take_float("epsilon"), T.float32(1.0)
    x_stride, read_stride, kept_stride = map(table.take, ("x_stride", "read_stride", "kept_stride"))
    side = v.let(count + 1)

    def put(target: v.Buffer, place: v.Expr, value: v.Expr) -> None:
        T.buffer_store(target, value, [v.let(place)])

    with T.serial(table.first, table.end) as token:
        source = v.let(token * x_stride)
        first, second = v.let(token * read_stride), v.let(token * kept_stride)

        def find(part: int, number: v.Expr) -> v.Expr:
            return v.let(x[source + number] * scales[T.int64(part)] + bias[number])

        # Rows are sources here: column j of C is row j of the factors, less the stream itself.
        def place_of(source_stream: v.Expr, target_stream: v.Expr) -> v.Expr:
            return v.let(second + target_stream * side + source_stream)

        def divide(stride: v.Expr, start: v.Expr) -> None:
            total = v.Cell(epsilon)
            with T.serial(count) as k:
                total.set(total.get() + kept[start + k * stride])
            factor = v.let(one / total.get())
            with T.serial(count) as k:
                at = v.let(start + k * stride)
                put(kept, at, kept[at] * factor)

        with T.serial(side * side) as place:
            put(read, first + place, T.float32(0.0))
        put(read, first + side * side - 1, T.float32(-1.0))
        with T.serial(count) as stream:
            own = v.let(v.take_sigmoid(find(0, stream), 1) + epsilon)
            put(read, first + count * side + stream, own)
            given = v.let(v.take_sigmoid(find(1, v.let(count + stream)), 1))
            put(kept, place_of(count, stream), given + given)
            put(kept, place_of(stream, count), T.float32(0.0))
            start = v.let((stream + 2) * count)
            most = v.Cell(find(2, start))
            with T.serial(count) as other:
                most.set(T.max(most.get(), find(2, v.let(start + other))))
            total = v.Cell(T.float32(0.0))
            with T.serial(count) as other:
                value = v.let(v.take_exponential(find(2, v.let(start + other)) - most.get(), 1))
                put(kept, place_of(stream, other), value)
                total.set(total.get() + value)
            factor = v.let(one / total.get())
            with T.serial(count) as other:
                at = place_of(stream, other)
                put(kept, at, kept[at] * factor + epsilon)
        put(kept, second + side * side - 1, T.float32(0.0))
        with T.serial(rounds) as turn:
            with T.If(turn > T.int64(0)), T.Then(), T.serial(count) as stream:
                divide(side, v.let(second + stream))
            with T.serial(count) as stream:
                divide(T.int64(1), v.let(second + stream * side))
        with T.serial(count) as stream:
            at = place_of(stream, stream)
            put(kept, at, kept[at] - one)


def emit_collapse(table: Table) -> None:
    """``y`` = the mean of ``count`` streams of x, times sigmoid(gates): items are pieces."""
    x, gates, y = (table.take_array(name, "float32") for name in ("x", "gates", "y"))
    strides = [table.take(f"{name}_stride") for name in ("x", "gates", "y")]
    length, count = table.take("length"), table.take("count")
    factor = v.let(T.float32(1.0) / T.cast(count, "float32"))
    with T.serial(table.first, table.end) as item:
        token, first, end = split_item(item, length)
        source, gate, target = (v.let(token * stride) for stride in strides)

        def emit(place: v.Expr, lanes: int) -> None:
            total = v.Cell(v.constant(0.0, "float32", lanes))
            with T.serial(count) as stream:
                at = v.let(stream * length + place)
                own = v.take_sigmoid(v.let(v.load(gates, gate + at, lanes)), lanes)
                total.set(T.fma(v.load(x, source + at, lanes), own, total.get()))
            v.store(y, target + place, total.get() * v.splat(factor, lanes), lanes)

        walk(first, end, emit)


def emit_inject(table: Table) -> None:
    """Add x to each of ``count`` streams of y, times 2 sigmoid(weight of the stream)."""
    x, y, weights = (table.take_array(name, "float32") for name in ("x", "y", "weights"))
    strides = [table.take(f"{name}_stride") for name in ("x", "y", "weights")]
    length, count = table.take("length"), table.take("count")
    with T.serial(table.first, table.end) as token:
        source, start, given = (v.let(token * stride) for stride in strides)
        with T.serial(count) as stream:
            own = v.let(v.take_sigmoid(v.let(weights[given + stream]), 1))
            factor, target = v.let(own + own), v.let(start + stream * length)

            def add(
                place: v.Expr, lanes: int, target: v.Expr = target, factor: v.Expr = factor
            ) -> None:
                old, value = v.load(y, target + place, lanes), v.load(x, source + place, lanes)
                v.store(y, target + place, T.fma(value, v.splat(factor, lanes), old), lanes)

            walk(T.int64(0), length, add)


def emit_admit(table: Table) -> None:
    """Stream j of y = values times sigmoid(s): s is the root of |keys[j] queries[j]| /
    sqrt(length), with the product's sign.  Items are streams of tokens."""
    names = ("keys", "queries", "values", "y")
    keys, queries, values, y = (table.take_array(name, "float32") for name in names)
    strides = [table.take(f"{name}_stride") for name in names]
    length, count = table.take("length"), table.take("count")
    zero = T.int64(0)
    with T.serial(table.first, table.end) as item:
        token = v.let(item // count)
        skip = v.let((item - token * count) * length)
        key, query, value, target = (v.let(token * stride) for stride in strides)

        def multiply(place: v.Expr, lanes: int) -> v.Expr:
            at = v.let(skip + place)
            return v.load(keys, key + at, lanes) * v.load(queries, query + at, lanes)

        product = add_up(zero, length, multiply)
        size = v.let(product / T.sqrt(T.cast(length, "float32")))
        root = v.let(T.sqrt(T.max(T.abs(size), T.float32(SMALLEST_PRODUCT))))
        signed = v.Cell(root)
        with T.If(size < T.float32(0.0)), T.Then():
            signed.set(T.float32(0.0) - root)
        with T.If(size == T.float32(0.0)), T.Then():
            signed.set(T.float32(0.0))
        factor = v.let(v.take_sigmoid(v.let(signed.get()), 1))

        def scale(place: v.Expr, lanes: int) -> None:
            own = v.load(values, value + place, lanes) * v.splat(factor, lanes)
            v.store(y, target + skip + place, own, lanes)

        walk(zero, length, scale)
