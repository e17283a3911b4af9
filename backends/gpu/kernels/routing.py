"""Which experts of a mixture compute a token, and with which weights.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``route_scores``        inputs float32 [T, length], router float32 [rows, length], route_scores
                        float32 [T, rows]; tokens
``route``               route_scores, routes float32 [T, experts and shared experts]; tokens
======================  ==========================================================================

Rows of the router are those of the experts, and one more where a gate weights the shared experts,
which follow the others.  `pi2.backends.experts.route` says what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import RouterKernels

_THREADS = 64


def list_router_kernels(router: RouterKernels) -> Iterator[c.Kernel]:
    """Make both."""
    yield make_route_scores(router)
    yield make_route(router)


def make_route_scores(router: RouterKernels) -> c.Kernel:
    """Make ``route_scores``: a work group for a score."""
    kernel = c.Kernel("route_scores", (_THREADS, 1, 1))
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32")
        rows = kernel.take_array("router", "float32")
        scores = kernel.take_array("route_scores", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=router.rows), Axis(number="tokens")) as place:
            row, token, thread = place.group[0], place.group[1], place.thread[0]
            first, begin = c.let(token * router.length), c.let(row * router.length)
            own = c.Cell(c.number(0.0))
            with T.serial(-(-router.length // _THREADS)) as turn:
                index = c.let(turn * _THREADS + thread)
                with c.when(index < router.length):
                    own.add(inputs[first + index] * rows[begin + index])
            total = c.add_in_group(c.share(_THREADS), thread, own.get(), _THREADS)
            with c.when(thread == 0):
                c.store(scores, token * router.rows + row, total)
    return kernel


def make_route(router: RouterKernels) -> c.Kernel:
    """Make ``route``: a work group for a token, a thread for every 64th expert.

    An expert is chosen where fewer than ``active`` others have a larger score, or an equal one and
    a smaller number.
    """
    kernel = c.Kernel("route", (_THREADS, 1, 1))
    experts = router.experts
    with kernel.declare():
        scores = kernel.take_array("route_scores", "float32")
        routes = kernel.take_array("routes", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(number="tokens")) as place:
            token, thread = place.group[0], place.thread[0]
            first = c.let(token * router.rows)
            begin = c.let(token * (experts + router.shared))
            top = c.Cell(scores[first])
            with T.serial(experts) as other:
                top.set(T.max(top.get(), scores[first + other]))
            weights = c.share(experts)
            for turn in range(-(-experts // _THREADS)):
                expert = c.let(thread + turn * _THREADS)
                own = c.let(scores[first + T.min(expert, experts - 1)])
                better = c.Cell(T.int32(0))
                with T.serial(experts) as other:
                    score = c.let(scores[first + other])
                    is_before = T.And(score == own, other < expert)
                    better.add(T.cast(T.Or(score > own, is_before), "int32"))
                share = _share(router, own, top.get())
                chosen = better.get() < router.active
                with c.when(expert < experts):
                    c.store(weights, expert, T.Select(chosen, share, c.number(0.0)))
            c.wait_for_group()
            total = c.Cell(c.number(1.0))
            if router.normalise:
                # The sum over all experts of a softmax cancels.
                total.set(c.number(0.0))
                with T.serial(experts) as other:
                    total.add(weights[other])
            elif router.kind == "softmax":
                total.set(c.number(0.0))
                with T.serial(experts) as other:
                    total.add(T.exp(scores[first + other] - top.get()))
            for turn in range(-(-experts // _THREADS)):
                expert = c.let(thread + turn * _THREADS)
                with c.when(expert < experts):
                    c.store(routes, begin + expert, weights[expert] / total.get())
            if router.shared:
                shared = c.Cell(c.number(1.0))
                if router.shared_gate:
                    shared.set(_squash(c.let(scores[first + experts])))
                for turn in range(-(-router.shared // _THREADS)):
                    expert = c.let(thread + turn * _THREADS)
                    with c.when(expert < router.shared):
                        c.store(routes, begin + experts + expert, shared.get())
    return kernel


def _share(router: RouterKernels, score: c.Expr, top: c.Expr) -> c.Expr:
    """Return an expert's weight, of a softmax not divided by the sum."""
    return c.let(T.exp(score - top)) if router.kind == "softmax" else c.let(_squash(score))


def _squash(score: c.Expr) -> c.Expr:
    """Return the logistic function of a named value."""
    return c.number(1.0) / (c.number(1.0) + T.exp(c.number(0.0) - score))
