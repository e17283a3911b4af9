"""Layers with a state, and gates of heads: kernels of operators, for tokens of any sequences.

A state belongs to a sequence, and position 0 begins with zeros.  Tokens of a sequence come in the
order of their positions.  A head's state [key_dim, value_dim] is stored column block by column
block: columns do not depend on each other, so a block of 16 goes through all tokens in the
first-level cache."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import GATES, NORM_PLACES, STATE_BLOCK
from pi2.backends.blocks.elements import add_squares, scale_to_one, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.compiler import vectors as v

_TURNS = 4
"""Sums of a column that are added up side by side."""


def _zeros(lanes: int) -> v.Expr:
    return v.constant(0.0, "float32", lanes)


def _begin_state(table: Table, token: v.Expr, state: v.Expr, lanes: int) -> None:
    """Clear columns of a state at the beginning of a sequence."""
    with T.If(table.positions[token] == 0), T.Then(), T.serial(table.key_dim) as element:
        v.store(table.memory, state + element * lanes, _zeros(lanes), lanes)


def emit_convolve(table: Table) -> None:
    """``y`` = after x silu(convolution(before x) + bias): items are blocks of channels.

    ``weights`` [kernel, channels], the oldest token's first; ``tails`` [kernel - 1, channels] of
    each sequence: inputs of earlier tokens."""
    zero = T.int64(0)

    def convolve(channel: v.Expr, lanes: int, place: v.Expr) -> None:
        with T.serial(table.tokens) as token:
            source = v.let(token * table.x_stride + place)
            value = v.Cell(v.load(table.x, source, lanes))
            with T.If(table.has_gates != zero), T.Then():
                value.set(value.get() * v.load(table.before, source, lanes))
            last = v.let(weights_at(table.window - 1, channel, lanes) * value.get())
            total = v.Cell(last)
            with T.If(table.has_bias != zero), T.Then():
                total.set(total.get() + v.load(table.bias, channel, lanes))
            tail = v.let(v.wide(table.sequences[token]) * table.sequence_stride + channel)
            begins = v.let(T.Select(table.positions[token] == 0, T.float32(0.0), T.float32(1.0)))
            with T.serial(table.window - 1) as step:
                at = v.let(tail + step * table.channels)
                # What another sequence left may be no number.
                kept = v.Cell(_zeros(lanes))
                with T.If(begins > T.float32(0.0)), T.Then():
                    kept.set(v.load(table.tails, at, lanes))
                total.set(T.fma(kept.get(), weights_at(step, channel, lanes), total.get()))
                with T.If(step > zero), T.Then():
                    v.store(table.tails, at - table.channels, kept.get(), lanes)
            with T.If(table.window > T.int64(1)), T.Then():
                v.store(table.tails, tail + (table.window - 2) * table.channels, value.get(), lanes)
            with T.If(table.is_silu != zero), T.Then():
                total.set(v.take_silu(total.get(), lanes))
            with T.If(table.has_gates != zero), T.Then():
                total.set(total.get() * v.load(table.after, source, lanes))
            v.store(table.y, token * table.y_stride + channel, total.get(), lanes)

    def weights_at(step: v.Expr, channel: v.Expr, lanes: int) -> v.Expr:
        return v.load(table.weights, step * table.channels + channel, lanes)

    with T.serial(table.first, table.end) as item:
        first = v.let(item * STATE_BLOCK)
        end = v.let(T.min(first + STATE_BLOCK, table.channels))
        with T.If(table.has_places == zero):
            with T.Then():
                walk(first, end, lambda channel, lanes: convolve(channel, lanes, channel))
            with T.Else():
                with T.serial(first, end) as channel:
                    convolve(channel, 1, v.let(v.wide(table.places[channel])))


def emit_prepare(table: Table) -> None:
    """Make factors [heads + decays] of gates, and normalise queries and keys: items are value heads
    of tokens.

    ``delta``: entry = sigmoid, decay = exp(rate softplus(step)) of a head or of each element of its
    keys; else entry = the step size softplus(step), decay = exp(rate entry)."""
    zero, one = T.int64(0), T.float32(1.0)
    size = v.let(T.cast(table.key_dim, "float32"))

    def normalize(array: v.Buffer, base: v.Expr, factor: v.Expr) -> None:
        total = add_squares(array, base, table.key_dim)
        scale = v.let(factor / T.sqrt(total + T.float32(1e-6)))

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.load(array, base + place, lanes) * v.splat(scale, lanes)
            v.store(array, base + place, value, lanes)

        walk(zero, table.key_dim, emit)

    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.heads)
        head = v.let(item - token * table.heads)
        target = v.let(token * table.y_stride)
        step = v.let(token * table.steps_stride + v.wide(table.step_of[head]))
        rate = v.let(table.rates[head])
        with T.If(table.is_delta != zero):
            with T.Then():
                with T.If(head < table.key_heads), T.Then():
                    base = v.let(token * table.x_stride + head * table.key_dim)
                    normalize(table.queries, base, v.let(one / T.sqrt(size)))
                    normalize(table.keys, base, one)
                entry = table.entries[token * table.entries_stride + v.wide(table.entry_of[head])]
                v.store(table.y, target + head, v.take_sigmoid(entry, 1), 1)
                with T.If(table.of_keys != zero):
                    with T.Then():

                        def decay(place: v.Expr, lanes: int) -> None:
                            own = v.let(head * table.key_dim + place)
                            moved = v.load(table.steps, step + place, lanes) + v.load(
                                table.bias, own, lanes
                            )
                            moved = v.let(moved)
                            own_rate = v.splat(rate, lanes)
                            power = v.Cell(own_rate * v.take_softplus(moved, lanes))
                            with T.If(table.has_floor != zero), T.Then():
                                # Rates are stored with a sign.
                                turned = v.let(_zeros(lanes) - own_rate * moved)
                                share = v.take_sigmoid(turned, lanes)
                                power.set(v.splat(table.floor, lanes) * share)
                            found = v.take_exponential(power.get(), lanes)
                            v.store(table.y, target + table.heads + own, found, lanes)

                        walk(zero, table.key_dim, decay)
                    with T.Else():
                        grown = v.let(v.take_softplus(table.steps[step] + table.bias[head], 1))
                        v.store(
                            table.y,
                            target + table.heads + head,
                            v.take_exponential(rate * grown, 1),
                            1,
                        )
            with T.Else():
                grown = v.let(v.take_softplus(table.steps[step] + table.bias[head], 1))
                grown = v.let(T.min(T.max(grown, table.shortest), table.longest))
                v.store(table.y, target + head, grown, 1)
                v.store(
                    table.y, target + table.heads + head, v.take_exponential(rate * grown, 1), 1
                )


def emit_recur(table: Table) -> None:
    """Take all tokens through the states S of value heads: items are blocks of columns of heads.

    For a token's key k, query q, value v, decay a and entry b: S = a S;  S += k (b (v - S^T k))^T
    with the delta rule, S += k (b v)^T without;  y = S^T q + skip v."""
    zero = T.int64(0)
    blocks = v.let((table.value_dim + STATE_BLOCK - 1) // STATE_BLOCK)

    def sum_keys(lanes: int, add: Callable[[v.Expr, v.Cell], None]) -> v.Expr:
        """Add up what ``add`` adds to a sum for every element of a key."""
        sums = [v.Cell(_zeros(lanes)) for _ in range(_TURNS)]
        whole = v.let(table.key_dim // _TURNS)
        with T.serial(whole) as step:
            for turn, cell in enumerate(sums):
                add(v.let(step * _TURNS + turn), cell)
        with T.serial(whole * _TURNS, table.key_dim) as element:
            add(element, sums[0])
        return v.let((sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get()))

    def take_token(head: v.Expr, column: v.Expr, lanes: int, token: v.Expr) -> None:
        row = v.let(token * table.x_stride)
        own = v.let(row + head // table.group * table.key_dim)
        factor = v.let(token * table.factors_stride + head)
        decays = v.let(token * table.factors_stride + table.heads)
        state = v.let(
            v.wide(table.sequences[token]) * table.sequence_stride
            + head * table.key_dim * table.value_dim
            + column * table.key_dim
        )
        _begin_state(table, token, state, lanes)
        value = v.let(v.load(table.values, row + v.wide(table.value_of[head]) + column, lanes))
        added = v.Cell(value)

        def go_through(decay_at: Callable[[v.Expr], v.Expr]) -> None:
            with T.If(table.is_delta != zero), T.Then():

                def know(element: v.Expr, cell: v.Cell) -> None:
                    part = v.load(table.memory, state + element * lanes, lanes)
                    weight = table.keys[own + element] * decay_at(element)
                    cell.set(T.fma(part, v.splat(weight, lanes), cell.get()))

                added.set(value - sum_keys(lanes, know))
            entry = v.let(added.get() * v.splat(table.factors[factor], lanes))

            def change(element: v.Expr, cell: v.Cell) -> None:
                place = v.let(state + element * lanes)
                old = v.load(table.memory, place, lanes) * v.splat(decay_at(element), lanes)
                new = v.let(T.fma(entry, v.splat(table.keys[own + element], lanes), old))
                v.store(table.memory, place, new, lanes)
                cell.set(T.fma(new, v.splat(table.queries[own + element], lanes), cell.get()))

            result = v.Cell(sum_keys(lanes, change))
            with T.If(table.has_skip != zero), T.Then():
                result.set(result.get() + value * v.splat(table.skip[head], lanes))
            v.store(
                table.y,
                token * table.y_stride + head * table.value_dim + column,
                result.get(),
                lanes,
            )

        with T.If(table.of_keys != zero):
            with T.Then():
                at = v.let(decays + head * table.key_dim)
                go_through(lambda element: table.factors[at + element])
            with T.Else():
                whole = v.let(table.factors[decays + head])
                go_through(lambda element: whole)

    with T.serial(table.first, table.end) as item:
        head = v.let(item // blocks)
        first = v.let((item - head * blocks) * STATE_BLOCK)

        def recur(column: v.Expr, lanes: int) -> None:
            with T.serial(table.tokens) as token:
                take_token(head, column, lanes, token)

        walk(first, v.let(T.min(first + STATE_BLOCK, table.value_dim)), recur)


def emit_scan(table: Table) -> None:
    """The first Mamba's recurrence: items are blocks of channels.

    For a channel's value v, step size s, state S [key_dim] and rates A: S = exp(s A) S + s v B;
    y = (C . S + skip v) silu(gate).  ``keys`` are B, and ``queries`` C."""

    def scan(channel: v.Expr, lanes: int) -> None:
        with T.serial(table.tokens) as token:
            state = v.let(
                v.wide(table.sequences[token]) * table.sequence_stride + channel * table.key_dim
            )
            _begin_state(table, token, state, lanes)
            value = v.let(v.load(table.x, token * table.x_stride + channel, lanes))
            moved = v.load(table.steps, token * table.steps_stride + channel, lanes)
            step = v.let(v.take_softplus(moved + v.load(table.bias, channel, lanes), lanes))
            added, parts = v.let(step * value), v.let(token * table.parts_stride)
            total = v.Cell(value * v.load(table.skip, channel, lanes))
            with T.serial(table.key_dim) as element:
                place = v.let(state + element * lanes)
                rate = v.load(table.rates, element * table.width + channel, lanes)
                kept = v.load(table.memory, place, lanes) * v.take_exponential(
                    v.let(rate * step), lanes
                )
                new = v.let(T.fma(added, v.splat(table.keys[parts + element], lanes), kept))
                v.store(table.memory, place, new, lanes)
                total.set(T.fma(new, v.splat(table.queries[parts + element], lanes), total.get()))
            gate = v.let(v.load(table.gates, token * table.gates_stride + channel, lanes))
            result = total.get() * v.take_silu(gate, lanes)
            v.store(table.y, token * table.y_stride + channel, result, lanes)

    with T.serial(table.first, table.end) as item:
        first = v.let(item * STATE_BLOCK)
        walk(first, v.let(T.min(first + STATE_BLOCK, table.width)), scan)


def emit_gate_heads(table: Table) -> None:
    """``y`` = gate(g) x of heads, which are normalised before or after it: items are heads of
    tokens.  A gate may be one number (``gate_each`` 0), and there may be none (``kind`` -1)."""
    zero = T.int64(0)

    with T.serial(table.first, table.end) as item:
        token = v.let(item // table.heads)
        head = v.let(item - token * table.heads)
        source = v.let(token * table.x_stride + v.wide(table.x_of[head]))
        gate = v.let(token * table.gates_stride + v.wide(table.gate_of[head]))
        target = v.let(token * table.y_stride + v.wide(table.y_of[head]))

        def put(element: v.Expr, value: v.Expr, lanes: int) -> None:
            weight = v.load(table.weights, head * table.weights_step + element, lanes)
            v.store(table.y, target + element, value * weight, lanes)

        def normalize(place: str, array: v.Buffer, base: v.Expr) -> None:
            """Normalise what ``array`` has from ``base`` on, to ``y``."""
            with T.If(table.norm_place == T.int64(NORM_PLACES.index(place))), T.Then():
                scale_to_one(array, base, table.width, table.epsilon, put)

        def copy(element: v.Expr, lanes: int) -> None:
            v.store(table.y, target + element, v.load(table.x, source + element, lanes), lanes)

        with T.If(table.norm_place != T.int64(NORM_PLACES.index("before"))), T.Then():
            walk(zero, table.width, copy)
        normalize("before", table.x, source)
        for number, name in enumerate(GATES):

            def open_gate(value: v.Expr, lanes: int, name: str = name) -> v.Expr:
                take = {"silu": v.take_silu, "sigmoid": v.take_sigmoid}.get(name, v.take_softplus)
                return take(value, lanes)

            def emit(element: v.Expr, lanes: int, open_gate: object = open_gate) -> None:
                assert callable(open_gate)
                own = v.let(v.load(table.gates, gate + element, lanes))
                value = v.load(table.y, target + element, lanes) * open_gate(own, lanes)
                v.store(table.y, target + element, value, lanes)

            def scale(element: v.Expr, lanes: int, open_gate: object = open_gate) -> None:
                assert callable(open_gate)
                own = v.splat(v.let(open_gate(v.let(table.gates[gate]), 1)), lanes)
                v.store(
                    table.y, target + element, v.load(table.y, target + element, lanes) * own, lanes
                )

            with T.If(table.kind == T.int64(number)), T.Then():
                with T.If(table.gate_each != zero):
                    with T.Then():
                        walk(zero, table.width, emit)
                    with T.Else():
                        walk(zero, table.width, scale)
        normalize("after", table.y, target)
