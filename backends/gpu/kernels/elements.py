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
    own.kernel.block, threads, length = _WIDE, _WIDE[0], own.length
    with own.kernel.run(Axis(number="tokens")) as place:
        token, thread = place.group[0], place.thread[0]
        x, y = own.x.skip(token * own.x_stride), own.y.skip(token * own.y_stride)
        shared, mean = c.share(threads), c.number(0.0)
        if own.centred:
            total = c.add_in_group(lambda index: x[index], length, thread, threads, shared)
            mean = c.let(total / T.cast(length, "float32"))
        scale = c.find_norm(
            lambda index: x[index] - mean, length, own.epsilon, thread, threads, shared
        )
        with c.walk(length, thread, threads) as element:
            value = (x[element] - mean) * scale
            if own.has_weights:
                value = value * own.weights[element]
            if own.has_bias:
                value = value + own.bias[element]
            value = value * own.factor
            y.put(element, c.let(value + y[element] if own.added else value))


def emit_cap(own: Arguments) -> None:
    with own.kernel.run_vectors() as (element, token), c.when(element < own.length):
        value = c.let(own.x[token * own.x_stride + element] * own.factor)
        is_soft = own.limit > c.number(0.0)
        size = c.let(T.Select(is_soft, own.limit, c.number(1.0)))
        capped = c.let(size * compute_tanh(c.let(value / size)))
        own.y.put(token * own.y_stride + element, T.Select(is_soft, capped, value))


def emit_term(own: Arguments) -> None:
    with own.kernel.run_vectors() as (element, token), c.when(element < own.length):
        value = own.x[token * own.x_stride + element]
        target = c.let(token * own.y_stride + element)
        is_factor = own.has_weights
        own.y.put(target, value * own.weights[element] if is_factor else value + own.y[target])


def emit_grow(own: Arguments) -> None:
    with own.kernel.run_vectors() as (element, token), c.when(element < own.length):
        index = c.let(token * own.x_stride + element)
        own.x.put(index, own.x[index] * own.factors[own.positions[token]])


def emit_turn(own: Arguments) -> None:
    """A work group turns and normalises a head; elements that do not turn stay without a norm."""
    own.kernel.block = (HEAD_THREADS, 1, 1)
    norm, rotated = NORM_PLACES[own.norm_place], own.rotated
    size = rotated if norm == "none" else own.head_dim
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        x, vector = own.x.skip(token * own.x_stride + head * own.head_dim), c.share(size)
        with c.walk(size, thread, HEAD_THREADS) as element:
            c.store(vector, element, x[element])
        c.wait_for_group()

        def scale(values: c.Buffer) -> c.Expr:
            return c.find_norm(lambda index: values[index], size, own.epsilon, thread, HEAD_THREADS)

        factor = scale(vector) if norm == "before" else None
        turned = c.share(size) if norm == "after" else None

        def read(index: c.Expr) -> c.Expr:
            value = c.let(vector[index])
            return value if factor is None else c.let(value * factor * own.weights[index])

        def write(index: c.Expr, value: c.Expr) -> None:
            x.put(index, value) if turned is None else c.store(turned, index, value)

        if rotated:
            half, at = rotated // 2, c.let(own.positions[token] * own.table_stride)
            with c.walk(half, thread, HEAD_THREADS) as pair:
                cos, sin = c.let(own.cos[at + pair]), c.let(own.sin[at + pair])
                low, high = read(pair), read(pair + half)
                write(pair, low * cos - high * sin)
                write(pair + half, high * cos + low * sin)
        with c.walk(size - rotated, thread, HEAD_THREADS) as rest:
            write(rest + rotated, read(c.let(rest + rotated)))
        if turned is not None:
            c.wait_for_group()
            factor = scale(turned)
            with c.walk(size, thread, HEAD_THREADS) as element:
                x.put(element, turned[element] * factor * own.weights[element])


def emit_gate_heads(own: Arguments) -> None:
    """A work group gates and normalises a head, or moves it."""
    own.kernel.block = (HEAD_THREADS, 1, 1)
    norm, kind = NORM_PLACES[own.norm_place], own.kind
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        x = own.x.skip(token * own.x_stride + own.x_of[head])
        y = own.y.skip(token * own.y_stride + own.y_of[head])

        def open_gate(index: c.Expr) -> c.Expr:
            first = token * own.gates_stride + own.gate_of[head]
            gate = c.let(own.gates[first + own.gate_each * index])
            if GATES[kind] == "softplus":
                return soften(gate)
            return c.let(c.squash(gate) * (gate if GATES[kind] == "silu" else c.number(1.0)))

        def read(index: c.Expr) -> c.Expr:
            is_gated = norm == "after" and kind >= 0
            return c.let(x[index] * open_gate(index) if is_gated else x[index])

        factor = None
        if norm != "none":
            factor = c.find_norm(read, own.width, own.epsilon, thread, HEAD_THREADS)
        with c.walk(own.width, thread, HEAD_THREADS) as index:
            value = read(index)
            if factor is not None:
                weight = own.weights[head * own.weights_step + index]
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
