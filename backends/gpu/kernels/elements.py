"""Instructions that take elements or heads of tokens by themselves: norms, positions, gates, sums.

`pi2.backends.reference.instructions.elements` defines them."""

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import GATES, NORM_PLACES
from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.arguments import Arguments
from pi2.backends.gpu.kernels.ffn import compute_tanh
from pi2.backends.gpu.kernels.specification import Axis

_WIDE = (256, 1, 1)
"""Threads that share a token's vector, or have an element each."""
HEAD_THREADS = 64
"""Threads that share a head's vector."""


def emit_normalize(own: Arguments) -> None:
    own.kernel.block, threads = _WIDE, _WIDE[0]
    arrays = own.take_some("x", "y", "weights", "bias")
    x_stride, y_stride, length, _ = own.number("x_stride", "y_stride", "length", "tokens")
    epsilon, factor = own.real("epsilon", "factor")
    with own.kernel.run(Axis(number="tokens")) as place:
        token, thread = place.group[0], place.thread[0]
        x, y = arrays["x"].skip(token * x_stride), arrays["y"].skip(token * y_stride)
        shared, mean = c.share(threads), c.number(0.0)
        if own.centred:
            total = c.add_in_group(lambda index: x[index], length, thread, threads, shared)
            mean = c.let(total / T.cast(length, "float32"))
        scale = c.find_norm(lambda index: x[index] - mean, length, epsilon, thread, threads, shared)
        with c.walk(length, thread, threads) as element:
            value = (x[element] - mean) * scale
            if "weights" in arrays:
                value = value * arrays["weights"][element]
            if "bias" in arrays:
                value = value + arrays["bias"][element]
            value = value * factor
            y.put(element, c.let(value + y[element] if own.added else value))


def emit_cap(own: Arguments) -> None:
    x, y = own.take("x", "y")
    x_stride, y_stride, length = own.number("x_stride", "y_stride", "length")
    limit, factor = own.real("limit", "factor")
    with own.kernel.run_vectors() as (element, token), c.when(element < length):
        value = c.let(x[token * x_stride + element] * factor)
        is_soft = limit > c.number(0.0)
        size = c.let(T.Select(is_soft, limit, c.number(1.0)))
        capped = c.let(size * compute_tanh(c.let(value / size)))
        y.put(token * y_stride + element, T.Select(is_soft, capped, value))


def emit_term(own: Arguments) -> None:
    arrays = own.take_some("x", "y", "weights")
    x, y = arrays["x"], arrays["y"]
    x_stride, y_stride, length = own.number("x_stride", "y_stride", "length")
    with own.kernel.run_vectors() as (element, token), c.when(element < length):
        value, target = x[token * x_stride + element], c.let(token * y_stride + element)
        is_factor = "weights" in arrays
        y.put(target, value * arrays["weights"][element] if is_factor else value + y[target])


def emit_grow(own: Arguments) -> None:
    x, positions, factors = own.take("x", "positions", "factors")
    x_stride, length = own.number("x_stride", "length")
    with own.kernel.run_vectors() as (element, token), c.when(element < length):
        index = c.let(token * x_stride + element)
        x.put(index, x[index] * factors[positions[token]])


def emit_turn(own: Arguments) -> None:
    """A work group turns and normalises a head; elements that do not turn stay without a norm."""
    own.kernel.block = (HEAD_THREADS, 1, 1)
    norm, rotated = NORM_PLACES[own.norm_place], own.rotated
    names = ["x", *(["positions", "cos", "sin"] if rotated else [])]
    names += [] if norm == "none" else ["weights"]
    arrays = dict(zip(names, own.take(*names), strict=True))
    x_stride, table_stride, *_ = own.number("x_stride", "table_stride", "heads", "tokens")
    (epsilon,) = own.real("epsilon")
    size = rotated if norm == "none" else own.head_dim
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        x, vector = arrays["x"].skip(token * x_stride + head * own.head_dim), c.share(size)
        with c.walk(size, thread, HEAD_THREADS) as element:
            c.store(vector, element, x[element])
        c.wait_for_group()

        def scale(values: c.Buffer) -> c.Expr:
            return c.find_norm(lambda index: values[index], size, epsilon, thread, HEAD_THREADS)

        factor = scale(vector) if norm == "before" else None
        turned = c.share(size) if norm == "after" else None

        def read(index: c.Expr) -> c.Expr:
            value = c.let(vector[index])
            return value if factor is None else c.let(value * factor * arrays["weights"][index])

        def write(index: c.Expr, value: c.Expr) -> None:
            x.put(index, value) if turned is None else c.store(turned, index, value)

        if rotated:
            half, at = rotated // 2, c.let(arrays["positions"][token] * table_stride)
            with c.walk(half, thread, HEAD_THREADS) as pair:
                cos, sin = (c.let(arrays[name][at + pair]) for name in ("cos", "sin"))
                low, high = read(pair), read(pair + half)
                write(pair, low * cos - high * sin)
                write(pair + half, high * cos + low * sin)
        with c.walk(size - rotated, thread, HEAD_THREADS) as rest:
            write(rest + rotated, read(c.let(rest + rotated)))
        if turned is not None:
            c.wait_for_group()
            factor = scale(turned)
            with c.walk(size, thread, HEAD_THREADS) as element:
                x.put(element, turned[element] * factor * arrays["weights"][element])


def emit_gate_heads(own: Arguments) -> None:
    """A work group gates and normalises a head, or moves it."""
    own.kernel.block = (HEAD_THREADS, 1, 1)
    norm, kind = NORM_PLACES[own.norm_place], own.kind
    names = ["x", "x_of", "y", "y_of", *(["gates", "gate_of"] if kind >= 0 else [])]
    names += [] if norm == "none" else ["weights"]
    arrays = dict(zip(names, own.take(*names), strict=True))
    x_stride, y_stride, gates_stride, gate_each, weights_step, width, *_ = own.number(
        *("x_stride", "y_stride", "gates_stride", "gate_each", "weights_step", "width"),
        *("heads", "tokens"),
    )
    (epsilon,) = own.real("epsilon")
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        x = arrays["x"].skip(token * x_stride + arrays["x_of"][head])
        y = arrays["y"].skip(token * y_stride + arrays["y_of"][head])

        def open_gate(index: c.Expr) -> c.Expr:
            first = token * gates_stride + arrays["gate_of"][head]
            gate = c.let(arrays["gates"][first + gate_each * index])
            if GATES[kind] == "softplus":
                return soften(gate)
            return c.let(c.squash(gate) * (gate if GATES[kind] == "silu" else c.number(1.0)))

        def read(index: c.Expr) -> c.Expr:
            is_gated = norm == "after" and kind >= 0
            return c.let(x[index] * open_gate(index) if is_gated else x[index])

        factor = None
        if norm != "none":
            factor = c.find_norm(read, width, epsilon, thread, HEAD_THREADS)
        with c.walk(width, thread, HEAD_THREADS) as index:
            value = read(index)
            if factor is not None:
                weight = arrays["weights"][head * weights_step + index]
                value = c.let(value * factor * weight)
            if kind >= 0 and norm != "after":
                value = value * open_gate(index)
            y.put(index, value)


def soften(value: c.Expr) -> c.Expr:
    """Return ln(1 + exp(value)) of a named value."""
    small = c.let(T.exp(c.number(0.0) - T.abs(value)))
    # A logarithm near 1 has lost what a short series keeps.
    third = c.number(0.5) - small * c.number(1.0 / 3)
    near = small * (c.number(1.0) - small * third)
    rest = T.Select(small < c.number(0.01), near, T.log(c.number(1.0) + small))
    return c.let(T.max(value, c.number(0.0)) + rest)
