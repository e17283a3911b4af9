"""Routers: kernels that choose experts, and list, weigh and spread these."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import ROUTERS
from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.compiler import vectors as v

_LEAST = -3.0e38
"""Below every score."""


def emit_route(table: Table) -> None:
    """Choose each token's ``active`` best experts: ``chosen`` int32 and ``weights`` [T, active];
    the first of equal ones wins."""
    own = _Routing(table)
    with T.serial(table.first, table.end) as token:
        with T.If(table.kind == T.int64(ROUTERS.index("mixer"))):
            with T.Then():
                own.mix(token)
            with T.Else():
                own.choose(token)
        own.scale(token)


_SHARES: Mapping[str, Callable[[v.Expr, int], v.Expr]] = {
    "sigmoid": v.take_sigmoid,
    "root_softplus": lambda value, lanes: T.sqrt(v.take_softplus(value, lanes)),
}
"""Shares of scores that no other score changes."""


class _Routing:
    """Arguments of a router, and a thread's scratch: shares, what experts are chosen by, and worths
    of groups."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._shares = v.let(table.thread * (table.scratch_stride // 4))
        self._wanted = v.let(self._shares + self.table.experts)
        self._worths = v.let(self._wanted + self.table.experts)

    def choose(self, token: v.Expr) -> None:
        """Choose by shares of all experts, or as a table says; shares are the weights."""
        zero, scratch, experts = T.int64(0), self.table.scratch, self.table.experts
        source, target = v.let(token * self.table.scores_stride), v.let(token * self.table.active)
        for name, take in _SHARES.items():
            with T.If(self.table.kind == T.int64(ROUTERS.index(name))), T.Then():
                self._take_each(source, take)
        with T.If(self.table.kind == T.int64(ROUTERS.index("softmax"))), T.Then():
            self._take_softmax(source)
        with T.serial(experts) as expert:
            worth = v.Cell(scratch[self._shares + expert])
            with T.If(self.table.bias_of_score != zero), T.Then():
                worth.set(self.table.scores[source + expert])
            with T.If(self.table.has_choice_bias != zero), T.Then():
                worth.set(worth.get() + self.table.choice_bias[expert])
            T.buffer_store(scratch, worth.get(), [self._wanted + expert])
        with T.If(self.table.groups > T.int64(1)), T.Then():
            self._leave_groups()
        total = v.Cell(T.float32(0.0))
        with T.serial(self.table.active) as place:
            own = v.Cell(T.int64(0))
            with T.If(self.table.has_table != zero):
                with T.Then():
                    row = v.let(v.wide(self.table.numbers[token]) * self.table.active)
                    own.set(T.cast(self.table.table[row + place], "int64"))
                with T.Else():
                    own.set(_find_best(scratch, self._wanted, experts))
            best = v.let(own.get())
            T.buffer_store(scratch, T.float32(_LEAST), [self._wanted + best])
            share = v.let(scratch[self._shares + best])
            T.buffer_store(self.table.chosen, T.cast(best, "int32"), [target + place])
            T.buffer_store(self.table.weights, share, [target + place])
            total.set(total.get() + share)
        factor = v.let(T.float32(1.0) / T.max(total.get(), T.float32(1e-20)))
        with T.If(self.table.normalise != zero), T.Then(), T.serial(self.table.active) as place:
            T.buffer_store(
                self.table.weights, self.table.weights[target + place] * factor, [target + place]
            )

    def mix(self, token: v.Expr) -> None:
        """Choose by scores; a weight is a share of the softmax of scores not far below."""
        scratch, experts = self.table.scratch, self.table.experts
        source, target = v.let(token * self.table.scores_stride), v.let(token * self.table.active)

        def copy(place: v.Expr, lanes: int) -> None:
            score = v.load(self.table.scores, source + place, lanes)
            v.store(scratch, self._wanted + place, score, lanes)

        walk(T.int64(0), experts, copy)
        with T.serial(self.table.active) as place:
            best = _find_best(scratch, self._wanted, experts)
            top = v.let(scratch[self._wanted + best])
            total = v.Cell(T.float32(0.0))
            with T.serial(experts) as expert:
                score = v.let(self.table.scores[source + expert])
                left = v.let(scratch[self._wanted + expert])
                distance = (top - score) / T.max(T.abs(score), top)
                is_near = T.bitwise_not(distance > self.table.tolerance * T.float32(2.0))
                with T.If(T.bitwise_and(is_near, left > T.float32(_LEAST))), T.Then():
                    total.set(total.get() + v.take_exponential(left - top, 1))
            T.buffer_store(scratch, T.float32(_LEAST), [self._wanted + best])
            T.buffer_store(self.table.chosen, T.cast(best, "int32"), [target + place])
            T.buffer_store(self.table.weights, T.float32(1.0) / total.get(), [target + place])

    def scale(self, token: v.Expr) -> None:
        """Multiply weights with factors, of all experts and of each."""
        target = v.let(token * self.table.active)
        with T.serial(self.table.active) as place:
            weight = v.Cell(self.table.weights[target + place] * self.table.scaling)
            with T.If(self.table.has_expert_scale != T.int64(0)), T.Then():
                own = v.wide(self.table.chosen[target + place])
                weight.set(weight.get() * self.table.expert_scale[own])
            T.buffer_store(self.table.weights, weight.get(), [target + place])

    def _take_each(self, source: v.Expr, take: Callable[[v.Expr, int], v.Expr]) -> None:
        def put(place: v.Expr, lanes: int) -> None:
            value = take(v.load(self.table.scores, source + place, lanes), lanes)
            v.store(self.table.scratch, self._shares + place, value, lanes)

        walk(T.int64(0), self.table.experts, put)

    def _take_softmax(self, source: v.Expr) -> None:
        scores, shares, zero = self.table.scores, self._shares, T.int64(0)
        top = v.Cell(T.float32(_LEAST))
        with T.serial(self.table.experts) as expert:
            top.set(T.max(top.get(), scores[source + expert]))
        largest = v.let(top.get())

        def exponentiate(place: v.Expr, lanes: int) -> v.Expr:
            value = v.load(scores, source + place, lanes) - v.splat(largest, lanes)
            share = v.let(v.take_exponential(value, lanes))
            v.store(self.table.scratch, shares + place, share, lanes)
            return share

        inverse = v.let(T.float32(1.0) / add_up(zero, self.table.experts, exponentiate))

        def divide(place: v.Expr, lanes: int) -> None:
            share = v.load(self.table.scratch, shares + place, lanes) * v.splat(inverse, lanes)
            v.store(self.table.scratch, shares + place, share, lanes)

        walk(zero, self.table.experts, divide)

    def _leave_groups(self) -> None:
        """Leave only experts of the best groups, by their best expert or the sum of the best
        two."""
        scratch, wanted, worths, groups = (
            self.table.scratch,
            self._wanted,
            self._worths,
            self.table.groups,
        )
        size = v.let(self.table.experts // groups)
        with T.serial(groups) as group:
            first, second = v.Cell(T.float32(_LEAST)), v.Cell(T.float32(_LEAST))
            with T.serial(size) as place:
                value = v.let(scratch[wanted + group * size + place])
                second.set(T.max(second.get(), T.min(first.get(), value)))
                first.set(T.max(first.get(), value))
            with T.If(self.table.best_two != T.int64(0)), T.Then():
                first.set(first.get() + second.get())
            T.buffer_store(scratch, first.get(), [worths + group])
        # Groups that were found are marked with a value above every worth.
        marked = T.float32(3.0e38)
        with T.serial(self.table.active_groups):
            best, worth = v.Cell(T.int64(-1)), v.Cell(T.float32(_LEAST))
            with T.serial(groups) as group:
                value = v.let(scratch[worths + group])
                is_open = T.bitwise_and(
                    value < marked, T.bitwise_or(value > worth.get(), best.get() < 0)
                )
                with T.If(is_open), T.Then():
                    worth.set(value)
                    best.set(group)
            T.buffer_store(scratch, marked, [worths + best.get()])
        with T.serial(groups) as group:
            with T.If(scratch[worths + group] < marked), T.Then(), T.serial(size) as place:
                T.buffer_store(scratch, T.float32(_LEAST), [wanted + group * size + place])


def _find_best(values: v.Buffer, first: v.Expr, count: v.Expr) -> v.Expr:
    best, worth = v.Cell(T.int64(0)), v.Cell(values[first])
    with T.serial(T.int64(1), count) as place:
        value = v.let(values[first + place])
        with T.If(value > worth.get()), T.Then():
            worth.set(value)
            best.set(place)
    return v.let(best.get())


def emit_group(table: Table) -> None:
    """List the pairs of tokens and experts by expert: ``starts`` int32 [experts + 1], ``pairs``
    int32 [T x active]; one item does it all."""
    chosen, count = table.chosen, v.let(table.active * table.tokens)
    with T.serial(table.first, table.end):
        with T.serial(table.experts + 1) as expert:
            T.buffer_store(table.starts, T.int32(0), [expert])
        with T.serial(count) as pair:
            place = v.let(v.wide(chosen[pair]) + 1)
            T.buffer_store(table.starts, table.starts[place] + 1, [place])
        with T.serial(table.experts) as expert:
            T.buffer_store(
                table.starts, table.starts[expert] + table.starts[expert + 1], [expert + 1]
            )
        with T.serial(count) as pair:
            # The beginning of an expert moves while its pairs are put, and is put back then.
            place = v.let(v.wide(chosen[pair]))
            T.buffer_store(table.pairs, T.cast(pair, "int32"), [v.wide(table.starts[place])])
            T.buffer_store(table.starts, table.starts[place] + 1, [place])
        with T.serial(table.experts) as number:
            expert = v.let(table.experts - number)
            T.buffer_store(table.starts, table.starts[expert - 1], [expert])
        T.buffer_store(table.starts, T.int32(0), [T.int64(0)])


def emit_weigh(table: Table) -> None:
    """Multiply vectors with the sigmoid of a score each: items are tokens."""
    with T.serial(table.first, table.end) as token:
        weight = v.let(v.take_sigmoid(table.scores[token * table.scores_stride], 1))
        source = v.let(token * table.x_stride)

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.load(table.x, source + place, lanes) * v.splat(weight, lanes)
            v.store(table.x, source + place, value, lanes)

        walk(T.int64(0), table.length, emit)


def emit_spread(table: Table) -> None:
    """``y[t]`` = the weights of all experts for a token, 0 if it was not chosen; shared experts,
    which follow the others, have a factor, times the sigmoid of a score."""
    with T.serial(table.first, table.end) as token:
        target = v.let(token * table.y_stride)
        with T.serial(table.length) as expert:
            T.buffer_store(table.y, T.float32(0.0), [target + expert])
        with T.serial(token * table.active, (token + 1) * table.active) as pair:
            T.buffer_store(table.y, table.weights[pair], [target + v.wide(table.chosen[pair])])
        weight = v.Cell(table.factor)
        with T.If(table.has_scores != T.int64(0)), T.Then():
            weight.set(table.factor * v.take_sigmoid(table.scores[token * table.scores_stride], 1))
        with T.serial(table.shared) as number:
            T.buffer_store(table.y, weight.get(), [target + table.experts + number])
