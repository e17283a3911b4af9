"""Norms of the residual stream, and sums into it.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``norm``                x float32 [first + T, length], weights float32 [length], [biases], outputs
                        [T, length]; first, tokens
``add``                 x [T, length], y [T, length] (added to x, times the residual factor);
                        tokens
``add_norm``            x, y (normalised before it is added), weights, [biases]; tokens
``spread``              y [T, length] becomes biases [length], in a mixture those of the experts
                        [experts, length] times their weights: routes [T, experts]; tokens
======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import NormKernels

_THREADS = 256


def list_norm_kernels(norm: NormKernels) -> Iterator[c.Kernel]:
    """Make all of them."""
    yield make_norm(norm)
    if norm.outputs:
        yield make_add_norm(norm)
    else:
        yield make_add(norm)
    if norm.spreads:
        yield make_spread(norm)


def make_norm(norm: NormKernels) -> c.Kernel:
    """Make ``norm``."""
    kernel = c.Kernel("norm", (_THREADS, 1, 1))
    with kernel.declare():
        x = kernel.take_array("x", "float32")
        weights, biases = _take_weights(kernel, norm)
        outputs = kernel.take_array("outputs", "float32")
        first_token = kernel.take_number("first")
        kernel.take_number("tokens")
        with kernel.run(Axis(number="tokens")) as place:
            first = c.let((first_token + place.group[0]) * norm.length)
            begin = c.let(place.group[0] * norm.length)

            def write(element: c.Expr, value: c.Expr) -> None:
                c.store(outputs, begin + element, value)

            _emit_norm(norm, x, first, weights, biases, place.thread[0], write)
    return kernel


def make_add_norm(norm: NormKernels) -> c.Kernel:
    """Make ``add_norm``."""
    kernel = c.Kernel("add_norm", (_THREADS, 1, 1))
    with kernel.declare():
        x, y = kernel.take_array("x", "float32"), kernel.take_array("y", "float32")
        weights, biases = _take_weights(kernel, norm)
        kernel.take_number("tokens")
        with kernel.run(Axis(number="tokens")) as place:
            first = c.let(place.group[0] * norm.length)

            def write(element: c.Expr, value: c.Expr) -> None:
                index = c.let(first + element)
                c.store(x, index, x[index] + value * c.number(norm.residual_factor))

            _emit_norm(norm, y, first, weights, biases, place.thread[0], write)
    return kernel


def make_add(norm: NormKernels) -> c.Kernel:
    """Make ``add``."""
    kernel = c.Kernel("add", (_THREADS, 1, 1))
    with kernel.declare():
        x, y = kernel.take_array("x", "float32"), kernel.take_array("y", "float32")
        kernel.take_number("tokens")
        groups = Axis(times=-(-norm.length // _THREADS))
        with kernel.run(groups, Axis(number="tokens")) as place:
            element = c.let(place.group[0] * _THREADS + place.thread[0])
            with c.when(element < norm.length):
                index = c.let(place.group[1] * norm.length + element)
                c.store(x, index, x[index] + y[index] * c.number(norm.residual_factor))
    return kernel


def make_spread(norm: NormKernels) -> c.Kernel:
    """Make ``spread``."""
    kernel = c.Kernel("spread", (_THREADS, 1, 1))
    with kernel.declare():
        y, biases = kernel.take_array("y", "float32"), kernel.take_array("biases", "float32")
        routes = kernel.take_array("routes", "float32") if norm.experts else None
        kernel.take_number("tokens")
        groups = Axis(times=-(-norm.length // _THREADS))
        with kernel.run(groups, Axis(number="tokens")) as place:
            element = c.let(place.group[0] * _THREADS + place.thread[0])
            first = c.let(place.group[1] * norm.experts)
            total = c.Cell(c.number(0.0))
            with c.when(element < norm.length):
                if routes is None:
                    total.set(biases[element])
                else:
                    with T.serial(norm.experts) as expert:
                        total.add(routes[first + expert] * biases[expert * norm.length + element])
                c.store(y, place.group[1] * norm.length + element, total.get())
    return kernel


def _take_weights(kernel: c.Kernel, norm: NormKernels) -> tuple[c.Buffer, c.Buffer | None]:
    weights = kernel.take_array("weights", "float32")
    return weights, kernel.take_array("biases", "float32") if norm.bias else None


def _emit_norm(
    norm: NormKernels,
    x: c.Buffer,
    first: c.Expr,
    weights: c.Buffer,
    biases: c.Buffer | None,
    thread: c.Expr,
    write: c.Write,
) -> None:
    """Normalise the vector at ``first``; elements beyond the width become 0, as their weights
    are."""
    shared = c.share(_THREADS)
    mean = c.number(0.0)
    if norm.kind == "layernorm":
        mean = c.let(_average(norm, lambda index: x[first + index], shared, thread))

    def square(index: c.Expr) -> c.Expr:
        value = c.let(x[first + index] - mean)
        return value * value

    mean_square = _average(norm, square, shared, thread)
    factor = c.let(c.number(1.0) / T.sqrt(mean_square + c.number(norm.epsilon)))
    with T.serial(-(-norm.length // _THREADS)) as turn:
        element = c.let(turn * _THREADS + thread)
        with c.when(element < norm.length):
            value = (x[first + element] - mean) * factor * weights[element]
            write(element, c.let(value if biases is None else value + biases[element]))


def _average(norm: NormKernels, read: c.Read, shared: c.Buffer, thread: c.Expr) -> c.Expr:
    """Return the mean of ``read(index)`` over the norm's width, the same in all threads."""
    own = c.Cell(c.number(0.0))
    with T.serial(-(-norm.width // _THREADS)) as turn:
        index = c.let(turn * _THREADS + thread)
        with c.when(index < norm.width):
            own.add(read(index))
    total = c.add_in_group(shared, thread, own.get(), _THREADS)
    return c.let(total * c.number(1.0 / norm.width))
