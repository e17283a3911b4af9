"""Layers with a state, and gates of heads."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F64, I32, I64
from pi2.backends.blocks.contract import GATES, NORM_PLACES, STATE_BLOCK
from pi2.backends.reference.instructions.arguments import Arguments, Array, widen
from pi2.backends.reference.instructions.elements import scale_to_one, take_sigmoid


def take_softplus(x: F64) -> F64:
    """ln(1 + exp(x)), without an exponential that overflows."""
    return np.asarray(np.logaddexp(0, x))


def _open_gate(name: str, x: F64) -> F64:
    if name == "softplus":
        return take_softplus(x)
    return take_sigmoid(x) * (x if name == "silu" else 1)


def _list_tokens(own: Arguments) -> list[tuple[int, int]]:
    """Return the sequence and the position of each token."""
    found = own.find_sequences(np.arange(own.tokens))
    return list(zip(*(array.tolist() for array in found), strict=True))


def _list_columns(own: Arguments, width: int) -> I64:
    """Return the columns that items of `STATE_BLOCK` columns are, of heads of ``width``."""
    blocks = -(-width // STATE_BLOCK)
    columns = (own.items % blocks * STATE_BLOCK)[:, None] + np.arange(STATE_BLOCK)
    heads = np.broadcast_to((own.items // blocks * width)[:, None], columns.shape)
    return np.asarray((heads + columns)[columns < width])


class _Memory:
    """Columns of the states of sequences, each a vector of ``depth``: blocks of `STATE_BLOCK`
    columns of a head have their elements side by side, the last columns follow one by one."""

    def __init__(self, own: Arguments, columns: I64, width: int, depth: int) -> None:
        self._own, self._shape = own, (len(columns), depth)
        number, whole = columns % width, width // STATE_BLOCK * STATE_BLOCK
        elements, is_whole = np.arange(depth), (number < whole)[:, None]
        block, lane = np.divmod(number[:, None], STATE_BLOCK)
        together = (block * depth + elements) * STATE_BLOCK + lane
        alone = number[:, None] * depth + elements
        head = (columns - number)[:, None] * depth
        self._places = head + np.where(is_whole, together, alone)
        self._size = int(self._places.max(initial=-1)) + 1

    def take(self, sequence: int, position: int) -> F64:
        """Return the state before a token; position 0 begins with zeros."""
        if position == 0:
            return np.zeros(self._shape)
        return widen(self._view(sequence)[self._places])

    def put(self, sequence: int, state: F64) -> None:
        self._view(sequence)[self._places] = state

    def _view(self, sequence: int) -> Array:
        skip = sequence * self._own.sequence_stride
        return self._own.view("memory", (self._size,), skip=skip)


def convolve(own: Arguments) -> None:
    channels = _list_columns(own, own.channels)
    places = own.numbers("places", own.channels)[channels] if own.has_places else channels
    size, window = int(places.max(initial=-1)) + 1, own.window
    x, before, after = (
        widen(own.view(name, (own.tokens, size), (own.x_stride, 1))[:, places])
        if name == "x" or own.has_gates
        else None
        for name in ("x", "before", "after")
    )
    assert x is not None
    weights = widen(own.view("weights", (window, own.channels))[:, channels])
    bias = own.vector("bias", own.channels)[channels] if own.has_bias else 0
    y = own.view("y", (own.tokens, own.channels), (own.y_stride, 1))
    for token, (sequence, position) in enumerate(_list_tokens(own)):
        shape, skip = (window - 1, own.channels), sequence * own.sequence_stride
        tails = own.view("tails", shape, skip=skip)
        kept = tails[:, channels] if position else np.zeros((window - 1, len(channels)))
        value = x[token] if before is None else x[token] * before[token]
        inputs = np.concatenate([kept, value[None]])
        tails[:, channels] = inputs[1:]
        total = (inputs * weights).sum(0) + bias
        if own.is_silu:
            total = total * take_sigmoid(total)
        y[token, channels] = total if after is None else total * after[token]


def prepare(own: Arguments) -> None:
    token, head = np.divmod(own.items, own.heads)
    count, depth = int(token.max(initial=-1)) + 1, own.key_dim
    if own.is_delta:
        is_key = head < own.key_heads
        for name, factor in (("queries", depth**-0.5), ("keys", 1.0)):
            shape = count, own.key_heads, depth
            array = own.view(name, shape, (own.x_stride, depth, 1))
            x = widen(array[token[is_key], head[is_key]])
            length = np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)
            array[token[is_key], head[is_key]] = x / length * factor

    def read(name: str, starts: I32, each: int) -> F64:
        places = starts[head][:, None] + np.arange(each)
        shape = count, int(places.max(initial=-1)) + 1
        stride = getattr(own, f"{name}_stride")
        return widen(own.view(name, shape, (stride, 1))[token[:, None], places])

    each = depth if own.of_keys else 1
    steps = read("steps", own.numbers("step_of", own.heads), each)
    moved = steps + own.view("bias", (own.heads, each))[head]
    rates = widen(own.vector("rates", own.heads)[head])[:, None]
    if own.is_delta:
        entries = take_sigmoid(read("entries", own.numbers("entry_of", own.heads), 1))
        powers = rates * take_softplus(moved)
        if own.of_keys and own.has_floor:
            powers = own.real("floor") * take_sigmoid(-rates * moved)
    else:
        entries = np.clip(take_softplus(moved), own.real("shortest"), own.real("longest"))
        powers = rates * entries
    y = own.view("y", (count, own.heads * (1 + each)), (own.y_stride, 1))
    y[token, head] = entries[:, 0]
    places = own.heads + head[:, None] * each + np.arange(each)
    y[token[:, None], places] = np.exp(powers)


def recur(own: Arguments) -> None:
    """Take tokens through columns S of states: see `pi2.backends.blocks.states.emit_recur`."""
    width, depth = own.value_dim, own.key_dim
    columns = _list_columns(own, width)
    memory, heads = _Memory(own, columns, width, depth), columns // width
    key_heads, each = own.heads // own.group, depth if own.of_keys else 1
    shape = own.tokens, key_heads, depth
    queries, keys = (
        widen(own.view(name, shape, (own.x_stride, depth, 1))[:, heads // own.group])
        for name in ("queries", "keys")
    )
    places = own.numbers("value_of", own.heads)[heads] + columns % width
    size = own.tokens, int(places.max(initial=-1)) + 1
    values = widen(own.view("values", size, (own.x_stride, 1))[:, places])
    size = own.tokens, own.heads * (1 + each)
    factors = widen(own.view("factors", size, (own.factors_stride, 1)))
    decays = factors[:, own.heads :].reshape(own.tokens, own.heads, each)[:, heads]
    skip = own.vector("skip", own.heads)[heads] if own.has_skip else 0
    y = own.view("y", (own.tokens, own.heads * width), (own.y_stride, 1))
    for token, (sequence, position) in enumerate(_list_tokens(own)):
        state, key, value = memory.take(sequence, position), keys[token], values[token]
        state = state * decays[token]
        added = value - (state * key).sum(-1) if own.is_delta else value
        state += (added * factors[token, heads])[:, None] * key
        y[token, columns] = (state * queries[token]).sum(-1) + skip * value
        memory.put(sequence, state)


def scan(own: Arguments) -> None:
    """Take tokens through channels' states S: see `pi2.backends.blocks.states.emit_scan`."""
    width, depth = own.width, own.key_dim
    channels = _list_columns(own, width)
    memory = _Memory(own, channels, width, depth)

    def read(name: str, stride: int, count: int) -> F64:
        return widen(own.view(name, (own.tokens, count), (stride, 1)))

    x, gates, steps = (
        read(name, getattr(own, f"{name}_stride"), width)[:, channels]
        for name in ("x", "gates", "steps")
    )
    keys, queries = (read(name, own.parts_stride, depth) for name in ("keys", "queries"))
    steps = take_softplus(steps + own.vector("bias", width)[channels])
    rates = widen(own.view("rates", (depth, width))[:, channels].T)
    skip = own.vector("skip", width)[channels]
    y = own.view("y", (own.tokens, width), (own.y_stride, 1))
    for token, (sequence, position) in enumerate(_list_tokens(own)):
        step = steps[token][:, None]
        state = memory.take(sequence, position) * np.exp(rates * step)
        state += step * x[token][:, None] * keys[token]
        total = state @ queries[token] + skip * x[token]
        y[token, channels] = total * _open_gate("silu", gates[token])
        memory.put(sequence, state)


def gate_heads(own: Arguments) -> None:
    token, head = np.divmod(own.items, own.heads)
    width, count = own.width, int(token.max(initial=-1)) + 1

    def place(name: str, each: int = 1) -> I64:
        starts = own.numbers(f"{name}_of", own.heads)[head].astype(np.int64)
        return starts[:, None] + each * np.arange(width)

    def view(name: str, places: I64) -> Array:
        shape = count, int(places.max(initial=-1)) + 1
        return own.view(name, shape, (getattr(own, f"{name}_stride"), 1))

    places = place("x")
    x = widen(view("x", places)[token[:, None], places])
    steps = (own.weights_step, 1)
    weights: F64 | float = 1.0
    if own.norm_place != NORM_PLACES.index("none"):
        weights = widen(own.view("weights", (own.heads, width), steps)[head])
    if own.norm_place == NORM_PLACES.index("before"):
        x = scale_to_one(x, own.real("epsilon")) * weights
    if own.kind >= 0:
        places = place("gate", own.gate_each)
        shape = count, int(places.max(initial=-1)) + 1
        gates = own.view("gates", shape, (own.gates_stride, 1))
        x = x * _open_gate(GATES[own.kind], widen(gates[token[:, None], places]))
    if own.norm_place == NORM_PLACES.index("after"):
        x = scale_to_one(x, own.real("epsilon")) * weights
    places = place("y")
    view("y", places)[token[:, None], places] = x
