"""Layers with a state, and gates of heads: kernels of operators, for tokens of any sequences.

A state belongs to a sequence, and position 0 begins with zeros.  Tokens of a sequence come in the
order of their positions.  A head's state [key_dim, value_dim] is stored column block by column
block: columns do not depend on each other, so a block of 16 goes through all tokens in the
first-level cache."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import GATES, NORM_PLACES, STATE_BLOCK
from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.machine import Table
from pi2.backends.compiler import vectors as v

_TURNS = 4
"""Sums of a column that are added up side by side."""


def _zeros(lanes: int) -> v.Expr:
    return v.constant(0.0, "float32", lanes)


def emit_convolve(table: Table) -> None:
    """``y`` = after x silu(convolution(before x) + bias): items are blocks of channels.

    ``weights`` [kernel, channels], the oldest token's first; ``tails`` [kernel - 1, channels] of
    each sequence: inputs of earlier tokens."""
    x, y = table.take_array("x", "float32"), table.take_array("y", "float32")
    gates = [table.take_array(name, "float32") for name in ("before", "after")]
    has_gates, x_stride, y_stride = map(table.take, ("has_gates", "x_stride", "y_stride"))
    weights, bias = table.take_array("weights", "float32"), table.take_array("bias", "float32")
    has_bias, has_places = table.take("has_bias"), table.take("has_places")
    places, tails = table.take_array("places", "int32"), table.take_array("tails", "float32")
    sequence_stride, channels = table.take("sequence_stride"), table.take("channels")
    kernel, is_silu, tokens = map(table.take, ("window", "is_silu", "tokens"))
    sequences = table.take_array("sequences", "int32")
    positions, zero = table.take_array("positions", "int32"), T.int64(0)

    def convolve(channel: v.Expr, lanes: int, place: v.Expr) -> None:
        with T.serial(tokens) as token:
            source = v.let(token * x_stride + place)
            value = v.Cell(v.load(x, source, lanes))
            with T.If(has_gates != zero), T.Then():
                value.set(value.get() * v.load(gates[0], source, lanes))
            last = v.let(weights_at(kernel - 1, channel, lanes) * value.get())
            total = v.Cell(last)
            with T.If(has_bias != zero), T.Then():
                total.set(total.get() + v.load(bias, channel, lanes))
            tail = v.let(v.wide(sequences[token]) * sequence_stride + channel)
            begins = v.let(T.Select(positions[token] == 0, T.float32(0.0), T.float32(1.0)))
            with T.serial(kernel - 1) as step:
                at = v.let(tail + step * channels)
                # What another sequence left may be no number.
                kept = v.Cell(_zeros(lanes))
                with T.If(begins > T.float32(0.0)), T.Then():
                    kept.set(v.load(tails, at, lanes))
                total.set(T.fma(kept.get(), weights_at(step, channel, lanes), total.get()))
                with T.If(step > zero), T.Then():
                    v.store(tails, at - channels, kept.get(), lanes)
            with T.If(kernel > T.int64(1)), T.Then():
                v.store(tails, tail + (kernel - 2) * channels, value.get(), lanes)
            with T.If(is_silu != zero), T.Then():
                total.set(v.take_silu(total.get(), lanes))
            with T.If(has_gates != zero), T.Then():
                total.set(total.get() * v.load(gates[1], source, lanes))
            v.store(y, token * y_stride + channel, total.get(), lanes)

    def weights_at(step: v.Expr, channel: v.Expr, lanes: int) -> v.Expr:
        return v.load(weights, step * channels + channel, lanes)

    with T.serial(table.first, table.end) as item:
        first = v.let(item * STATE_BLOCK)
        end = v.let(T.min(first + STATE_BLOCK, channels))
        with T.If(has_places == zero):
            with T.Then():
                walk(first, end, lambda channel, lanes: convolve(channel, lanes, channel))
            with T.Else():
                with T.serial(first, end) as channel:
                    convolve(channel, 1, v.let(v.wide(places[channel])))


def emit_prepare(table: Table) -> None:
    """Make factors [heads + decays] of gates, and normalise queries and keys: items are value heads
    of tokens.

    ``delta``: entry = sigmoid, decay = exp(rate softplus(step)) of a head or of each element of its
    keys; else entry = the step size softplus(step), decay = exp(rate entry)."""
    queries, keys = (table.take_array(name, "float32") for name in ("queries", "keys"))
    x_stride, key_heads, key_dim = map(table.take, ("x_stride", "key_heads", "key_dim"))
    is_delta, of_keys = table.take("is_delta"), table.take("of_keys")
    entries, entries_stride = table.take_array("entries", "float32"), table.take("entries_stride")
    steps, steps_stride = table.take_array("steps", "float32"), table.take("steps_stride")
    entry_of, step_of = (table.take_array(name, "int32") for name in ("entry_of", "step_of"))
    bias, rates = table.take_array("bias", "float32"), table.take_array("rates", "float32")
    floor, has_floor = table.take_float("floor"), table.take("has_floor")
    limits = [table.take_float(name) for name in ("shortest", "longest")]
    heads, y, y_stride = (
        table.take("heads"),
        table.take_array("y", "float32"),
        table.take("y_stride"),
    )
    zero, one = T.int64(0), T.float32(1.0)
    size = v.let(T.cast(key_dim, "float32"))

    def normalize(array: v.Buffer, base: v.Expr, factor: v.Expr) -> None:
        def square(place: v.Expr, lanes: int) -> v.Expr:
            value = v.let(v.load(array, base + place, lanes))
            return value * value

        total = add_up(zero, key_dim, square)
        scale = v.let(factor / T.sqrt(total + T.float32(1e-6)))

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.load(array, base + place, lanes) * v.splat(scale, lanes)
            v.store(array, base + place, value, lanes)

        walk(zero, key_dim, emit)

    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        head = v.let(item - token * heads)
        target = v.let(token * y_stride)
        step = v.let(token * steps_stride + v.wide(step_of[head]))
        rate = v.let(rates[head])
        with T.If(is_delta != zero):
            with T.Then():
                with T.If(head < key_heads), T.Then():
                    base = v.let(token * x_stride + head * key_dim)
                    normalize(queries, base, v.let(one / T.sqrt(size)))
                    normalize(keys, base, one)
                entry = entries[token * entries_stride + v.wide(entry_of[head])]
                v.store(y, target + head, v.take_sigmoid(entry, 1), 1)
                with T.If(of_keys != zero):
                    with T.Then():

                        def decay(place: v.Expr, lanes: int) -> None:
                            own = v.let(head * key_dim + place)
                            moved = v.load(steps, step + place, lanes) + v.load(bias, own, lanes)
                            moved = v.let(moved)
                            own_rate = v.splat(rate, lanes)
                            power = v.Cell(own_rate * v.take_softplus(moved, lanes))
                            with T.If(has_floor != zero), T.Then():
                                # Rates are stored with a sign.
                                turned = v.let(_zeros(lanes) - own_rate * moved)
                                share = v.take_sigmoid(turned, lanes)
                                power.set(v.splat(floor, lanes) * share)
                            found = v.take_exponential(power.get(), lanes)
                            v.store(y, target + heads + own, found, lanes)

                        walk(zero, key_dim, decay)
                    with T.Else():
                        grown = v.let(v.take_softplus(steps[step] + bias[head], 1))
                        v.store(y, target + heads + head, v.take_exponential(rate * grown, 1), 1)
            with T.Else():
                grown = v.let(v.take_softplus(steps[step] + bias[head], 1))
                grown = v.let(T.min(T.max(grown, limits[0]), limits[1]))
                v.store(y, target + head, grown, 1)
                v.store(y, target + heads + head, v.take_exponential(rate * grown, 1), 1)


def emit_recur(table: Table) -> None:
    """Take all tokens through the states S of value heads: items are blocks of columns of heads.

    For a token's key k, query q, value v, decay a and entry b: S = a S;  S += k (b (v - S^T k))^T
    with the delta rule, S += k (b v)^T without;  y = S^T q + skip v."""
    queries, keys, values = (
        table.take_array(name, "float32") for name in ("queries", "keys", "values")
    )
    x_stride, heads, group = map(table.take, ("x_stride", "heads", "group"))
    key_dim, value_dim = table.take("key_dim"), table.take("value_dim")
    value_of = table.take_array("value_of", "int32")
    factors, factors_stride = table.take_array("factors", "float32"), table.take("factors_stride")
    of_keys, is_delta = table.take("of_keys"), table.take("is_delta")
    skip, has_skip = table.take_array("skip", "float32"), table.take("has_skip")
    memory, sequence_stride = table.take_array("memory", "float32"), table.take("sequence_stride")
    y, y_stride, tokens = (
        table.take_array("y", "float32"),
        table.take("y_stride"),
        table.take("tokens"),
    )
    sequences = table.take_array("sequences", "int32")
    positions, zero = table.take_array("positions", "int32"), T.int64(0)
    blocks = v.let((value_dim + STATE_BLOCK - 1) // STATE_BLOCK)

    def sum_keys(lanes: int, add: Callable[[v.Expr, v.Cell], None]) -> v.Expr:
        """Add up what ``add`` adds to a sum for every element of a key."""
        sums = [v.Cell(_zeros(lanes)) for _ in range(_TURNS)]
        whole = v.let(key_dim // _TURNS)
        with T.serial(whole) as step:
            for turn, cell in enumerate(sums):
                add(v.let(step * _TURNS + turn), cell)
        with T.serial(whole * _TURNS, key_dim) as element:
            add(element, sums[0])
        return v.let((sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get()))

    def take_token(head: v.Expr, column: v.Expr, lanes: int, token: v.Expr) -> None:
        row = v.let(token * x_stride)
        own = v.let(row + head // group * key_dim)
        factor = v.let(token * factors_stride + head)
        decays = v.let(token * factors_stride + heads)
        state = v.let(
            v.wide(sequences[token]) * sequence_stride
            + head * key_dim * value_dim
            + column * key_dim
        )
        with T.If(positions[token] == 0), T.Then():
            with T.serial(key_dim) as element:
                v.store(memory, state + element * lanes, _zeros(lanes), lanes)
        value = v.let(v.load(values, row + v.wide(value_of[head]) + column, lanes))
        added = v.Cell(value)

        def go_through(decay_at: Callable[[v.Expr], v.Expr]) -> None:
            with T.If(is_delta != zero), T.Then():

                def know(element: v.Expr, cell: v.Cell) -> None:
                    part = v.load(memory, state + element * lanes, lanes)
                    weight = keys[own + element] * decay_at(element)
                    cell.set(T.fma(part, v.splat(weight, lanes), cell.get()))

                added.set(value - sum_keys(lanes, know))
            entry = v.let(added.get() * v.splat(factors[factor], lanes))

            def change(element: v.Expr, cell: v.Cell) -> None:
                place = v.let(state + element * lanes)
                old = v.load(memory, place, lanes) * v.splat(decay_at(element), lanes)
                new = v.let(T.fma(entry, v.splat(keys[own + element], lanes), old))
                v.store(memory, place, new, lanes)
                cell.set(T.fma(new, v.splat(queries[own + element], lanes), cell.get()))

            result = v.Cell(sum_keys(lanes, change))
            with T.If(has_skip != zero), T.Then():
                result.set(result.get() + value * v.splat(skip[head], lanes))
            v.store(y, token * y_stride + head * value_dim + column, result.get(), lanes)

        with T.If(of_keys != zero):
            with T.Then():
                at = v.let(decays + head * key_dim)
                go_through(lambda element: factors[at + element])
            with T.Else():
                whole = v.let(factors[decays + head])
                go_through(lambda element: whole)

    with T.serial(table.first, table.end) as item:
        head = v.let(item // blocks)
        first = v.let((item - head * blocks) * STATE_BLOCK)

        def recur(column: v.Expr, lanes: int) -> None:
            with T.serial(tokens) as token:
                take_token(head, column, lanes, token)

        walk(first, v.let(T.min(first + STATE_BLOCK, value_dim)), recur)


def emit_scan(table: Table) -> None:
    """The first Mamba's recurrence: items are blocks of channels.

    For a channel's value v, step size s, state S [key_dim] and rates A: S = exp(s A) S + s v B;
    y = (C . S + skip v) silu(gate).  ``keys`` are B, and ``queries`` C."""
    x, gates, steps, keys, queries = (
        table.take_array(name, "float32") for name in ("x", "gates", "steps", "keys", "queries")
    )
    x_stride, gates_stride = table.take("x_stride"), table.take("gates_stride")
    steps_stride, parts_stride = table.take("steps_stride"), table.take("parts_stride")
    bias, rates, skip = (table.take_array(name, "float32") for name in ("bias", "rates", "skip"))
    memory, sequence_stride = table.take_array("memory", "float32"), table.take("sequence_stride")
    width, key_dim, tokens = table.take("width"), table.take("key_dim"), table.take("tokens")
    y, y_stride = table.take_array("y", "float32"), table.take("y_stride")
    sequences = table.take_array("sequences", "int32")
    positions = table.take_array("positions", "int32")

    def scan(channel: v.Expr, lanes: int) -> None:
        with T.serial(tokens) as token:
            state = v.let(v.wide(sequences[token]) * sequence_stride + channel * key_dim)
            with T.If(positions[token] == 0), T.Then():
                with T.serial(key_dim) as element:
                    v.store(memory, state + element * lanes, _zeros(lanes), lanes)
            value = v.let(v.load(x, token * x_stride + channel, lanes))
            moved = v.load(steps, token * steps_stride + channel, lanes)
            step = v.let(v.take_softplus(moved + v.load(bias, channel, lanes), lanes))
            added, parts = v.let(step * value), v.let(token * parts_stride)
            total = v.Cell(value * v.load(skip, channel, lanes))
            with T.serial(key_dim) as element:
                place = v.let(state + element * lanes)
                rate = v.load(rates, element * width + channel, lanes)
                kept = v.load(memory, place, lanes) * v.take_exponential(v.let(rate * step), lanes)
                new = v.let(T.fma(added, v.splat(keys[parts + element], lanes), kept))
                v.store(memory, place, new, lanes)
                total.set(T.fma(new, v.splat(queries[parts + element], lanes), total.get()))
            gate = v.let(v.load(gates, token * gates_stride + channel, lanes))
            result = total.get() * v.take_silu(gate, lanes)
            v.store(y, token * y_stride + channel, result, lanes)

    with T.serial(table.first, table.end) as item:
        first = v.let(item * STATE_BLOCK)
        walk(first, v.let(T.min(first + STATE_BLOCK, width)), scan)


def emit_gate_heads(table: Table) -> None:
    """``y`` = gate(g) x of heads, which are normalised before or after it: items are heads of
    tokens.  A gate may be one number (``gate_each`` 0), and there may be none (``kind`` -1)."""
    x, gates, y = (table.take_array(name, "float32") for name in ("x", "gates", "y"))
    x_of, gate_of, y_of = (table.take_array(name, "int32") for name in ("x_of", "gate_of", "y_of"))
    x_stride, gates_stride, y_stride = map(table.take, ("x_stride", "gates_stride", "y_stride"))
    heads, width, kind = map(table.take, ("heads", "width", "kind"))
    gate_each = table.take("gate_each")
    weights, weights_step = table.take_array("weights", "float32"), table.take("weights_step")
    norm_place, epsilon, zero = table.take("norm_place"), table.take_float("epsilon"), T.int64(0)

    with T.serial(table.first, table.end) as item:
        token = v.let(item // heads)
        head = v.let(item - token * heads)
        source = v.let(token * x_stride + v.wide(x_of[head]))
        gate = v.let(token * gates_stride + v.wide(gate_of[head]))
        target = v.let(token * y_stride + v.wide(y_of[head]))

        def normalize(place: str, array: v.Buffer, base: v.Expr) -> None:
            """Normalise what ``array`` has from ``base`` on, to ``y``."""
            with T.If(norm_place == T.int64(NORM_PLACES.index(place))), T.Then():

                def square(element: v.Expr, lanes: int) -> v.Expr:
                    value = v.let(v.load(array, base + element, lanes))
                    return value * value

                mean = add_up(zero, width, square) / T.cast(width, "float32")
                scale = v.let(T.float32(1.0) / T.sqrt(mean + epsilon))

                def emit(element: v.Expr, lanes: int) -> None:
                    weight = v.load(weights, head * weights_step + element, lanes)
                    value = v.load(array, base + element, lanes) * v.splat(scale, lanes)
                    v.store(y, target + element, value * weight, lanes)

                walk(zero, width, emit)

        def copy(element: v.Expr, lanes: int) -> None:
            v.store(y, target + element, v.load(x, source + element, lanes), lanes)

        with T.If(norm_place != T.int64(NORM_PLACES.index("before"))), T.Then():
            walk(zero, width, copy)
        normalize("before", x, source)
        for number, name in enumerate(GATES):

            def open_gate(value: v.Expr, lanes: int, name: str = name) -> v.Expr:
                take = {"silu": v.take_silu, "sigmoid": v.take_sigmoid}.get(name, v.take_softplus)
                return take(value, lanes)

            def emit(element: v.Expr, lanes: int, open_gate: object = open_gate) -> None:
                assert callable(open_gate)
                own = v.let(v.load(gates, gate + element, lanes))
                value = v.load(y, target + element, lanes) * open_gate(own, lanes)
                v.store(y, target + element, value, lanes)

            def scale(element: v.Expr, lanes: int, open_gate: object = open_gate) -> None:
                assert callable(open_gate)
                own = v.splat(v.let(open_gate(v.let(gates[gate]), 1)), lanes)
                v.store(y, target + element, v.load(y, target + element, lanes) * own, lanes)

            with T.If(kind == T.int64(number)), T.Then():
                with T.If(gate_each != zero):
                    with T.Then():
                        walk(zero, width, emit)
                    with T.Else():
                        walk(zero, width, scale)
        normalize("after", y, target)
