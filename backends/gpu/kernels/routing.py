"""Which experts of an MoE model compute a token, and with which weights.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``route_scores``        inputs float32 [T, length], router float32 [experts, length], [shared_router
                        float32 [length]], [router_bias float32 [experts]], route_scores float32
                        [T, rows]; tokens
``route``               route_scores, [choice biases float32 [experts]], routes float32 [T, experts,
                        shared experts, others]; tokens
``route_first``         routes: 1 for the first ``count`` experts, 0 for all others; count, tokens
======================  ==========================================================================

Scores are those of the experts, and one more where a gate weights the shared experts, which follow
the others.  See `pi2.backends.reference.instructions.elements`.  ``route_first`` is
for layers that are no MoE model: their neurons are stored as those of the first experts.

Norms of the residual stream, and sums into it.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``norm``                x float32 [first + T, length], weights float32 [length], [biases], outputs
                        [T, length]; first, tokens
``add``                 x [T, length], y [T, length] (added to x, times the residual factor);
                        tokens
``add_norm``            x, y (normalised before it is added), weights, [biases]; tokens
``spread``              y [T, length] becomes biases [length], in an MoE model biases
                        [experts, length] of experts times routes [T, experts]; tokens
======================  ==========================================================================
"""

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.code import (
    Weights,
    count_words,
    list_elements,
    unpack_word,
    widen_half,
)
from pi2.backends.gpu.kernels.products import ROWS, VECTOR, Tiles
from pi2.backends.gpu.kernels.specification import (
    Axis,
    EmbeddingKernels,
    NormKernels,
    RouterKernels,
)
from pi2.plan.weights.layout import GROUP

_NORM_WIDTH = 256


def list_norm_kernels(norm: NormKernels) -> Iterator[c.Kernel]:
    yield make_norm(norm)
    if norm.norm.outputs:
        yield make_add_norm(norm)
    else:
        yield make_add(norm)
    if norm.spreads:
        yield make_spread(norm)


def make_norm(norm: NormKernels) -> c.Kernel:
    kernel = c.Kernel("norm", (_NORM_WIDTH, 1, 1))
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
    kernel = c.Kernel("add_norm", (_NORM_WIDTH, 1, 1))
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
    kernel = c.Kernel("add", (_NORM_WIDTH, 1, 1))
    with kernel.declare():
        x, y = kernel.take_array("x", "float32"), kernel.take_array("y", "float32")
        with kernel.run_elements(norm.length) as (element, token):
            index = c.let(token * norm.length + element)
            c.store(x, index, x[index] + y[index] * c.number(norm.residual_factor))
    return kernel


def make_spread(norm: NormKernels) -> c.Kernel:
    kernel = c.Kernel("spread", (_NORM_WIDTH, 1, 1))
    with kernel.declare():
        y, biases = kernel.take_array("y", "float32"), kernel.take_array("biases", "float32")
        routes = kernel.take_array("routes", "float32") if norm.experts else None
        with kernel.run_elements(norm.length) as (element, token):
            total = c.Cell(c.number(0.0))
            if routes is None:
                total.set(biases[element])
            else:
                first = c.let(token * norm.experts)
                with T.serial(norm.experts) as expert:
                    total.add(routes[first + expert] * biases[expert * norm.length + element])
            c.store(y, token * norm.length + element, total.get())
    return kernel


def _take_weights(kernel: c.Kernel, norm: NormKernels) -> tuple[c.Buffer, c.Buffer | None]:
    weights = kernel.take_array("weights", "float32")
    return weights, kernel.take_array("biases", "float32") if norm.norm.bias else None


def _emit_norm(
    norm: NormKernels,
    x: c.Buffer,
    first: c.Expr,
    weights: c.Buffer,
    biases: c.Buffer | None,
    thread: c.Expr,
    write: c.Write,
) -> None:
    """Normalise the vector at ``first``; elements beyond the width become 0, as weights are."""
    shared, mean = c.share(_NORM_WIDTH), c.number(0.0)
    if norm.norm.kind == "layernorm":
        total = c.add_in_group(
            lambda index: x[first + index], norm.width, thread, _NORM_WIDTH, shared
        )
        mean = c.let(total * c.number(1.0 / norm.width))
    epsilon = norm.norm.epsilon
    factor = c.find_norm(
        lambda index: x[first + index] - mean, norm.width, epsilon, thread, _NORM_WIDTH, shared
    )
    with c.walk(norm.length, thread, _NORM_WIDTH) as element:
        value = (x[first + element] - mean) * factor * weights[element]
        write(element, c.let(value if biases is None else value + biases[element]))


_ROW_WIDTH = 64


def list_embedding_kernels(embedding: EmbeddingKernels, fp16: bool) -> Iterator[c.Kernel]:
    yield make_embed(embedding, fp16)
    if embedding.positions:
        yield make_add_positions(embedding)


def make_embed(embedding: EmbeddingKernels, fp16: bool) -> c.Kernel:
    """Make ``embed``: a thread for a group of a token's vector."""
    kernel = c.Kernel("embed", (_ROW_WIDTH, 1, 1))
    groups = embedding.length // GROUP
    precision = embedding.precision
    with kernel.declare():
        ids = kernel.take_array("ids", "int32")
        weights = Weights.take(kernel, "matrix", precision, VECTOR, fp16)
        x = kernel.take_array("x", "float32")
        with kernel.run_elements(groups) as (group, token):
            row = c.let(ids[token])
            tile, in_tile = c.let(T.floordiv(row, ROWS)), c.let(T.floormod(row, ROWS))
            tiles = Tiles(weights, 1, embedding.length)
            words = tiles.load_group(tile, 0, group, in_tile)
            scale = tiles.load_scale(tile, 0, group, in_tile)
            factor = c.let(scale * c.number(embedding.factor))
            first = c.let(token * embedding.length + group * GROUP)
            for number in range(count_words(precision)):
                elements = list_elements(precision, number)
                values = unpack_word(precision, words[number])
                for element, value in zip(elements, values, strict=True):
                    c.store(x, first + element, value * factor)
    return kernel


def make_add_positions(embedding: EmbeddingKernels) -> c.Kernel:
    """Make ``add_positions``: a thread for two elements of a token's vector."""
    kernel = c.Kernel("add_positions", (_ROW_WIDTH, 1, 1))
    words = embedding.length // 2
    with kernel.declare():
        places = kernel.take_array("places", "int32")
        positions = kernel.take_array("positions", "uint32")
        x = kernel.take_array("x", "float32")
        with kernel.run_elements(words) as (word, token):
            packed = c.let(positions[places[token * 2 + 1] * words + word])
            first = c.let(token * embedding.length + word * 2)
            for half in range(2):
                value = widen_half(packed, half == 1)
                c.store(x, first + half, x[first + half] + value)
    return kernel


THREADS = 256


def make_read() -> c.Kernel:
    """Make ``read``: neighbouring threads read neighbouring vectors. Nothing is left out, because
    the vectors are written combined."""
    kernel = c.Kernel("read", (THREADS, 1, 1))
    with kernel.declare():
        words = kernel.take_array("words", "uint32x4")
        sums = kernel.take_array("sums", "uint32")
        kernel.take_number("groups")
        steps = kernel.take_number("steps")
        with kernel.run(Axis(number="groups")) as place:
            group, thread = place.group[0], place.thread[0]
            first = c.let(group * steps * THREADS + thread)
            combined = c.Cell(T.uint32(0))
            with T.serial(steps) as step:
                vector = c.let(words[first + step * THREADS])
                for lane in range(4):
                    combined.set(T.bitwise_xor(combined.get(), c.take_lane(vector, lane)))
            c.store(sums, group * THREADS + thread, combined.get())
    return kernel


_THREADS = 64
_LOWEST = -1e30
_SMALLEST_SUM = 1e-20


def list_router_kernels(router: RouterKernels) -> Iterator[c.Kernel]:
    yield make_route_scores(router)
    yield make_route(router)
    if router.some_dense:
        yield make_route_first(router)


def make_route_scores(router: RouterKernels) -> c.Kernel:
    kernel = c.Kernel("route_scores", (_THREADS, 1, 1))
    with kernel.declare():
        inputs = kernel.take_array("inputs", "float32")
        rows = kernel.take_array("router", "float32")
        shared = kernel.take_array("shared_router", "float32") if router.moe.shared_gate else None
        biases = kernel.take_array("router_bias", "float32") if router.moe.router_bias else None
        scores = kernel.take_array("route_scores", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=router.rows), Axis(number="tokens")) as place:
            row, token, thread = place.group[0], place.group[1], place.thread[0]
            first = c.let(token * router.length)
            begin = c.let(T.min(row, router.moe.experts - 1) * router.length)

            def multiply(index: c.Expr) -> c.Expr:
                weight = rows[begin + index]
                if shared is not None:
                    weight = T.Select(row < router.moe.experts, weight, shared[index])
                return inputs[first + index] * weight

            total = c.add_in_group(multiply, router.length, thread, _THREADS)
            if biases is not None:
                bias = biases[T.min(row, router.moe.experts - 1)]
                total = total + T.Select(row < router.moe.experts, bias, c.number(0.0))
            with c.when(thread == 0):
                c.store(scores, token * router.rows + row, total)
    return kernel


def make_route(router: RouterKernels) -> c.Kernel:
    """Make ``route``: a work group per token; an expert is chosen if under ``active`` others
    win."""
    kernel = c.Kernel("route", (_THREADS, 1, 1))
    experts = router.moe.experts
    with kernel.declare():
        scores = kernel.take_array("route_scores", "float32")
        biases = kernel.take_array("choice_biases", "float32") if router.moe.choice_bias else None
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
            if router.moe.groups > 1:
                _leave_out_groups(router, wanted, thread)
            weights = c.share(experts)
            for turn in turns:
                expert = c.let(thread + turn * _THREADS)
                better = _count_better(wanted, T.min(expert, experts - 1), experts)
                with c.when(expert < experts):
                    chosen = better < router.moe.active_experts
                    c.store(weights, expert, T.Select(chosen, shares[expert], c.number(0.0)))
            c.wait_for_group()
            total = c.Cell(c.number(1.0))
            if router.moe.normalise_weights:
                total.set(c.number(0.0))
                with T.serial(experts) as other:
                    total.add(weights[other])
                total.set(T.max(total.get(), c.number(_SMALLEST_SUM)))
            factor = c.let(c.number(router.moe.scaling) / total.get())
            for turn in turns:
                expert = c.let(thread + turn * _THREADS)
                with c.when(expert < experts):
                    c.store(routes, begin + expert, weights[expert] * factor)
            shared = c.Cell(c.number(1.0))
            if router.moe.shared_gate:
                shared.set(c.squash(c.let(scores[first + experts])))
            for turn in range(-(-(router.pitch - experts) // _THREADS)):
                expert = c.let(thread + turn * _THREADS)
                with c.when(expert < router.pitch - experts):
                    weight = T.Select(
                        expert < router.moe.shared_experts, shared.get(), c.number(0.0)
                    )
                    c.store(routes, begin + experts + expert, weight)
    return kernel


def make_route_first(router: RouterKernels) -> c.Kernel:
    kernel = c.Kernel("route_first", (_THREADS, 1, 1))
    with kernel.declare():
        routes = kernel.take_array("routes", "float32")
        count = kernel.take_number("count")
        with kernel.run_elements(router.pitch) as (expert, token):
            weight = T.Select(expert < count, c.number(1.0), c.number(0.0))
            c.store(routes, token * router.pitch + expert, weight)
    return kernel


class _Shares:
    def __init__(self, router: RouterKernels, scores: c.Buffer, first: c.Expr) -> None:
        self._router, self._scores, self._first = router, scores, first
        if router.moe.router == "softmax":
            top, total = c.Cell(scores[first]), c.Cell(c.number(0.0))
            with T.serial(router.moe.experts) as other:
                top.set(T.max(top.get(), scores[first + other]))
            with T.serial(router.moe.experts) as other:
                total.add(T.exp(scores[first + other] - top.get()))
            self._top, self._total = top.get(), total.get()

    def __call__(self, expert: c.Expr) -> c.Expr:
        score = c.let(self._scores[self._first + expert])
        if self._router.moe.router == "sigmoid":
            return c.let(c.squash(score))
        return c.let(T.exp(score - self._top) / self._total)


def _leave_out_groups(router: RouterKernels, wanted: c.Buffer, thread: c.Expr) -> None:
    groups, size = router.moe.groups, router.moe.experts // router.moe.groups
    worths = c.share(groups)
    for turn in range(-(-groups // _THREADS)):
        group = c.let(thread + turn * _THREADS)
        start = c.let(T.min(group, groups - 1) * size)
        best, second = c.Cell(c.number(_LOWEST)), c.Cell(c.number(_LOWEST))
        with T.serial(size) as index:
            value = c.let(wanted[start + index])
            second.set(T.max(second.get(), T.min(value, best.get())))
            best.set(T.max(best.get(), value))
        is_sum = router.moe.group_score == "best-two" and size > 1
        worth = c.let(best.get() + second.get() if is_sum else best.get())
        with c.when(group < groups):
            c.store(worths, group, worth)
    c.wait_for_group()
    for turn in range(-(-router.moe.experts // _THREADS)):
        expert = c.let(thread + turn * _THREADS)
        group = c.let(T.floordiv(T.min(expert, router.moe.experts - 1), size))
        better = _count_better(worths, group, groups)
        with c.when(T.And(expert < router.moe.experts, better >= router.moe.active_groups)):
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
