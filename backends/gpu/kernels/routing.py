"""Rows that tokens look up, plain matrices, and the experts of an MoE model that compute a token.

``spread_biases`` is no instruction: it begins sums float32 [T, length] of neurons, or adds to them
(``adds``), with biases float32 [experts, length] of experts times their weights, routes float32 [T,
experts]."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import ROUTERS
from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.arguments import Arguments
from pi2.backends.gpu.kernels.code import Weights, count_words, place_elements, unpack_word
from pi2.backends.gpu.kernels.products import ROWS, VECTOR, Tiles
from pi2.backends.gpu.kernels.specification import Axis, FfnKernels
from pi2.formats import find_format, find_packing
from pi2.plan.weights.layout import GROUP

_THREADS = 64
_LOWEST = -1e30
_SMALLEST_SUM = 1e-20


def emit_take_rows(own: Arguments) -> None:
    """A thread looks a group of a token's row up."""
    own.kernel.block = (_THREADS, 1, 1)
    precision = own.step.format
    length = own.blocks * find_format(find_packing(precision).joined).block
    weights = Weights.take(own.kernel, "matrix", precision, VECTOR, own.fp16)
    tiles = Tiles(weights, 1, length)
    with own.kernel.run_elements(length // GROUP) as (group, token):
        row = c.let(own.numbers[token])
        tile, in_tile = c.let(T.floordiv(row, ROWS)), c.let(T.floormod(row, ROWS))
        words = tiles.load_group(tile, 0, group, in_tile)
        factor = c.let(tiles.load_scale(tile, 0, group, in_tile) * own.factor)
        target = own.y.skip(token * own.y_stride + group * GROUP)
        for number in range(count_words(precision)):
            elements = place_elements(precision, number)
            values = unpack_word(precision, words[number])
            for element, value in zip(elements, values, strict=True):
                value = value * factor
                target.put(element, target[element] + value if own.added else value)


def emit_multiply(own: Arguments) -> None:
    """A work group multiplies a row of float32 with a token."""
    own.kernel.block, length = (_THREADS, 1, 1), own.blocks
    with own.kernel.run(Axis(number="rows"), Axis(number="tokens")) as place:
        row, token, thread = *place.group, place.thread[0]
        x, weights = own.x.skip(token * own.x_stride), own.weights.skip(row * length)
        total = c.add_in_group(lambda index: x[index] * weights[index], length, thread, _THREADS)
        with c.when(thread == 0):
            value = total + own.bias[row] if own.has_bias else total
            target, value = c.let(token * own.y_stride + row), c.let(value * own.factor)
            own.y.put(target, own.y[target] + value if own.added else value)


def emit_route(own: Arguments) -> None:
    """A work group chooses the experts of a token: those that fewer than ``active`` others beat;
    so many are the place of an expert among the chosen ones."""
    own.kernel.block = (_THREADS, 1, 1)
    experts, active = own.experts, own.active
    turns = range(-(-experts // _THREADS))
    with own.kernel.run(Axis(number="tokens")) as place:
        token, thread = place.group[0], place.thread[0]
        scores = own.scores.skip(token * own.scores_stride)
        shares, wanted, weights = (c.share(experts) for _ in range(3))
        find_share = _make_shares(own, lambda expert: scores[expert])
        with c.walk(experts, thread, _THREADS) as expert:
            share = find_share(expert)
            c.store(shares, expert, share)
            is_moved = own.has_choice_bias
            c.store(wanted, expert, share + own.choice_bias[expert] if is_moved else share)
        c.wait_for_group()
        if own.groups > 1:
            _leave_out_groups(own, wanted, thread)
        places = []
        for turn in turns:
            expert = c.let(thread + turn * _THREADS)
            places.append(_count_better(wanted, T.min(expert, experts - 1), experts))
            with c.when(expert < experts):
                share = T.Select(places[-1] < active, shares[expert], c.number(0.0))
                c.store(weights, expert, share)
        c.wait_for_group()
        total = c.Cell(c.number(1.0))
        if own.normalise:
            total.set(c.number(0.0))
            with T.serial(experts) as other:
                total.add(weights[other])
            total.set(T.max(total.get(), c.number(_SMALLEST_SUM)))
        factor = c.let(own.scaling / total.get())
        for turn, better in zip(turns, places, strict=True):
            expert = c.let(thread + turn * _THREADS)
            with c.when(T.And(expert < experts, better < active)):
                at = c.let(token * active + better)
                own.chosen.put(at, expert)
                own.weights.put(at, weights[expert] * factor)


def _make_shares(own: Arguments, read: c.Read) -> c.Read:
    """Return what makes an expert's share of scores."""
    if ROUTERS[own.kind] == "sigmoid":
        return lambda expert: c.let(c.squash(c.let(read(expert))))
    top, total = c.Cell(read(T.int32(0))), c.Cell(c.number(0.0))
    with T.serial(own.experts) as other:
        top.set(T.max(top.get(), read(other)))
    with T.serial(own.experts) as other:
        total.add(T.exp(read(other) - top.get()))
    return lambda expert: c.let(T.exp(read(expert) - top.get()) / total.get())


def _leave_out_groups(own: Arguments, wanted: c.Buffer, thread: c.Expr) -> None:
    groups, size = own.groups, own.experts // own.groups
    worths = c.share(groups)
    with c.walk(groups, thread, _THREADS) as group:
        best, second = c.Cell(c.number(_LOWEST)), c.Cell(c.number(_LOWEST))
        with T.serial(size) as index:
            value = c.let(wanted[group * size + index])
            second.set(T.max(second.get(), T.min(value, best.get())))
            best.set(T.max(best.get(), value))
        is_sum = own.best_two and size > 1
        c.store(worths, group, best.get() + second.get() if is_sum else best.get())
    c.wait_for_group()
    with c.walk(own.experts, thread, _THREADS) as expert:
        better = _count_better(worths, T.floordiv(expert, size), groups)
        lowest = c.number(_LOWEST)
        c.store(wanted, expert, T.Select(better < own.active_groups, wanted[expert], lowest))
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


def emit_spread(own: Arguments) -> None:
    with own.kernel.run_vectors() as (expert, token), c.when(expert < own.length):
        weight = c.Cell(c.number(0.0))
        with T.serial(own.active) as place:
            at = c.let(token * own.active + place)
            weight.add(T.Select(own.chosen[at] == expert, own.weights[at], c.number(0.0)))
        rest = own.factor
        if own.has_scores:
            rest = c.let(rest * c.squash(c.let(own.scores[token * own.scores_stride])))
        is_shared = T.And(expert >= own.experts, expert < own.experts + own.shared)
        value = T.Select(is_shared, rest, weight.get())
        own.y.put(token * own.y_stride + expert, value)


def make_spread_biases(ffn: FfnKernels) -> c.Kernel:
    with c.Kernel.declare("spread_biases", (_THREADS, 1, 1)) as kernel:
        y, biases = kernel.take_array("sums"), kernel.take_array("biases")
        routes, adds = kernel.take_array("routes"), kernel.take_number("adds")
        kernel.take_number("tokens")
        with kernel.run_elements(ffn.hidden) as (element, token):
            total, first = c.Cell(c.number(0.0)), c.let(token * ffn.experts)
            target = c.let(token * ffn.hidden + element)
            with c.when(adds > 0):
                total.set(y[target])
            with T.serial(ffn.experts) as expert:
                total.add(routes[first + expert] * biases[expert * ffn.hidden + element])
            c.store(y, target, total.get())
    return kernel


_READERS = 256


def make_read() -> c.Kernel:
    """Make ``read``: neighbouring threads read neighbouring vectors. Nothing is left out, because
    the vectors are written combined."""
    with c.Kernel.declare("read", (_READERS, 1, 1)) as kernel:
        words = kernel.take_array("words", "uint32x4")
        sums = kernel.take_array("sums", "uint32")
        kernel.take_number("groups")
        steps = kernel.take_number("steps")
        with kernel.run(Axis(number="groups")) as place:
            group, thread = place.group[0], place.thread[0]
            first = c.let(group * steps * _READERS + thread)
            combined = c.Cell(T.uint32(0))
            with T.serial(steps) as step:
                vector = c.let(words[first + step * _READERS])
                for lane in range(4):
                    combined.set(T.bitwise_xor(combined.get(), c.take_lane(vector, lane)))
            c.store(sums, group * _READERS + thread, combined.get())
    return kernel
