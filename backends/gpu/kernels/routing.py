"""Which experts of a mixture compute a token, and with which weights.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``route_scores``        inputs float32 [T, length], router float32 [rows, length], [router biases
                        float32 [experts]], route_scores float32 [T, rows]; tokens
``route``               route_scores, [choice biases float32 [experts]], routes float32 [T, experts,
                        shared experts, others]; tokens
``route_first``         routes: 1 for the first ``count`` experts, 0 for all others; count, tokens
======================  ==========================================================================

Rows of the router are those of the experts, and one more where a gate weights the shared experts,
which follow the others.  `pi2.backends.experts.route` says what is computed.  ``route_first`` is
for layers that are no mixture: their neurons are stored as those of the first experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import RouterKernels

_THREADS = 64
_LOWEST = -1e30
_SMALLEST_SUM = 1e-20


def list_router_kernels(router: RouterKernels) -> Iterator[c.Kernel]:
    """Make all of them."""
    yield make_route_scores(router)
    yield make_route(router)
    if router.some_dense:
        yield make_route_first(router)


def make_route_scores(router: RouterKernels) -> c.Kernel:
    """Make ``route_scores``: a work group for a score."""
    kernel = c.Kernel("route_scores", (_THREADS, 1, 1))
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32")
        rows = kernel.take_array("router", "float32")
        biases = kernel.take_array("router_biases", "float32") if router.bias else None
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
            if biases is not None:
                bias = biases[T.min(row, router.experts - 1)]
                total = total + T.Select(row < router.experts, bias, c.number(0.0))
            with c.when(thread == 0):
                c.store(scores, token * router.rows + row, total)
    return kernel


def make_route(router: RouterKernels) -> c.Kernel:
    """Make ``route``: a work group for a token, a thread for every 64th expert.

    An expert is chosen where fewer than ``active`` others are wanted more, or as much and have a
    smaller number.
    """
    kernel = c.Kernel("route", (_THREADS, 1, 1))
    experts = router.experts
    with kernel.declare():
        scores = kernel.take_array("route_scores", "float32")
        biases = kernel.take_array("choice_biases", "float32") if router.choice_bias else None
        routes = kernel.take_array("routes", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(number="tokens")) as place:
            token, thread = place.group[0], place.thread[0]
            first = c.let(token * router.rows)
            begin = c.let(token * router.pitch)
            shares, wanted = c.share(experts), c.share(experts)
            turns = range(-(-experts // _THREADS))
            find_share = _Shares(router, scores, first)
            for turn in turns:
                expert = c.let(thread + turn * _THREADS)
                share = find_share(c.let(T.min(expert, experts - 1)))
                with c.when(expert < experts):
                    c.store(shares, expert, share)
                    worth = share if biases is None else share + biases[expert]
                    c.store(wanted, expert, worth)
            c.wait_for_group()
            if router.groups > 1:
                _leave_out_groups(router, wanted, thread)
            weights = c.share(experts)
            for turn in turns:
                expert = c.let(thread + turn * _THREADS)
                better = _count_better(wanted, T.min(expert, experts - 1), experts)
                with c.when(expert < experts):
                    chosen = better < router.active
                    c.store(weights, expert, T.Select(chosen, shares[expert], c.number(0.0)))
            c.wait_for_group()
            total = c.Cell(c.number(1.0))
            if router.normalise:
                total.set(c.number(0.0))
                with T.serial(experts) as other:
                    total.add(weights[other])
                total.set(T.max(total.get(), c.number(_SMALLEST_SUM)))
            factor = c.let(c.number(router.scaling) / total.get())
            for turn in turns:
                expert = c.let(thread + turn * _THREADS)
                with c.when(expert < experts):
                    c.store(routes, begin + expert, weights[expert] * factor)
            shared = c.Cell(c.number(1.0))
            if router.shared_gate:
                shared.set(_squash(c.let(scores[first + experts])))
            for turn in range(-(-(router.pitch - experts) // _THREADS)):
                expert = c.let(thread + turn * _THREADS)
                with c.when(expert < router.pitch - experts):
                    weight = T.Select(expert < router.shared, shared.get(), c.number(0.0))
                    c.store(routes, begin + experts + expert, weight)
    return kernel


def make_route_first(router: RouterKernels) -> c.Kernel:
    """Make ``route_first``."""
    kernel = c.Kernel("route_first", (_THREADS, 1, 1))
    with kernel.declare():
        routes = kernel.take_array("routes", "float32")
        count = kernel.take_number("count")
        kernel.take_number("tokens")
        groups = Axis(times=-(-router.pitch // _THREADS))
        with kernel.run(groups, Axis(number="tokens")) as place:
            expert = c.let(place.group[0] * _THREADS + place.thread[0])
            with c.when(expert < router.pitch):
                weight = T.Select(expert < count, c.number(1.0), c.number(0.0))
                c.store(routes, place.group[1] * router.pitch + expert, weight)
    return kernel


class _Shares:
    """Weights of experts before any is chosen."""

    def __init__(self, router: RouterKernels, scores: c.Buffer, first: c.Expr) -> None:
        self._router, self._scores, self._first = router, scores, first
        if router.kind == "softmax":
            top, total = c.Cell(scores[first]), c.Cell(c.number(0.0))
            with T.serial(router.experts) as other:
                top.set(T.max(top.get(), scores[first + other]))
            with T.serial(router.experts) as other:
                total.add(T.exp(scores[first + other] - top.get()))
            self._top, self._total = top.get(), total.get()

    def __call__(self, expert: c.Expr) -> c.Expr:
        score = c.let(self._scores[self._first + expert])
        if self._router.kind == "sigmoid":
            return c.let(_squash(score))
        return c.let(T.exp(score - self._top) / self._total)


def _leave_out_groups(router: RouterKernels, wanted: c.Buffer, thread: c.Expr) -> None:
    """Let nothing want the experts of groups that are not among the best ones."""
    groups, size = router.groups, router.experts // router.groups
    worths = c.share(groups)
    for turn in range(-(-groups // _THREADS)):
        group = c.let(thread + turn * _THREADS)
        start = c.let(T.min(group, groups - 1) * size)
        best, second = c.Cell(c.number(_LOWEST)), c.Cell(c.number(_LOWEST))
        with T.serial(size) as index:
            value = c.let(wanted[start + index])
            second.set(T.max(second.get(), T.min(value, best.get())))
            best.set(T.max(best.get(), value))
        is_sum = router.group_best == 2 and size > 1
        worth = c.let(best.get() + second.get() if is_sum else best.get())
        with c.when(group < groups):
            c.store(worths, group, worth)
    c.wait_for_group()
    for turn in range(-(-router.experts // _THREADS)):
        expert = c.let(thread + turn * _THREADS)
        group = c.let(T.floordiv(T.min(expert, router.experts - 1), size))
        better = _count_better(worths, group, groups)
        with c.when(T.And(expert < router.experts, better >= router.active_groups)):
            c.store(wanted, expert, c.number(_LOWEST))
    c.wait_for_group()


def _count_better(values: c.Buffer, place: c.Expr, count: int) -> c.Expr:
    """Return how many of ``values`` come before the one at ``place``: larger ones, and equal ones
    with a smaller number."""
    place = c.let(place)
    own = c.let(values[place])
    better = c.Cell(T.int32(0))
    with T.serial(count) as other:
        value = c.let(values[other])
        is_before = T.And(value == own, other < place)
        better.add(T.cast(T.Or(value > own, is_before), "int32"))
    return better.get()


def _squash(score: c.Expr) -> c.Expr:
    """Return the logistic function of a named value."""
    return c.number(1.0) / (c.number(1.0) + T.exp(c.number(0.0) - score))
