"""Layers with a state: causal convolutions, the gated delta rule, and Mamba-2's recurrence
(`pi2.backends.kernels.scan` has the first Mamba's).

The recurrent state of a value head is a matrix S [key_dim, value_dim].  For every token, with its
key k, query q, value v, decay a and entry b::

    delta:  S = a S;  S += k (b (v - S^T k))^T;  result = S^T q   (a of S, or of each of its rows)
    mamba:  S = a S;  S += k (b v)^T;            result = S^T q + skip v

Columns of S do not depend on each other: a task takes some lanes of a head's values through all
tokens of a chunk, and its part of S, [key_dim, lanes], stays in the first-level cache.  That reads
and writes S once for every token, which is less work than the projections of the same layer; the
chunked form (Yang et al. 2024, section 3) would save it for matrix products on top.  The result
depends on nothing but the tokens: chunks of any length give equal bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.kv import count_lanes
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_shared
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.scan import ScanArrays, emit_scan
from pi2.backends.kernels.schedule import Schedule, emit_each_token
from pi2.backends.kernels.spec import KernelSpec
from pi2.model.states import StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArrays:
    """Latents of factors or gates, [tokens, rank], and the matrix that makes them; only values are
    multiplied, in float32: decays multiply up."""

    ranks: Activations
    matrix: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArrays:
    """What mixing reads and writes; flat float32 buffers.

    ``projected`` [tokens, entries] as `StateShape` has them; ``gates`` [tokens, factors], of
    which the first ``value_heads`` become b and the others a; ``tail`` [kernel - 1, channels], the
    oldest token's first; ``memory`` [value_heads, value_dim / lanes, key_dim, lanes]."""

    shape: StateShape
    projected: v.Buffer
    gates: v.Buffer
    mixed: Activations
    tail: v.Buffer
    memory: v.Buffer
    convolution: v.Buffer
    convolution_bias: v.Buffer | None
    decay: v.Buffer | None
    step: v.Buffer | None
    skip: v.Buffer | None
    norm: v.Buffer | None
    scan: ScanArrays | None
    """What the first Mamba has instead of the four before it."""
    decays: RankArrays | None
    """What decays are made of, and how, if not of the layer's input."""
    output_gates: RankArrays | None
    """What gates of values are made of, and how, if not of the layer's input."""

    @property
    def once(self) -> v.Expr:
        """1, see `Activations.once`."""
        return self.mixed.once

    def find_row(self, token: v.Expr) -> v.Expr:
        return v.let(v.wide(token) * self.shape.entries)

    def find_result(self, token: v.Expr) -> v.Expr:
        return v.let(v.wide(token) * self.shape.stored_width)

    def find_factors(self, token: v.Expr) -> v.Expr:
        return v.let(token * self.shape.factors)


def emit_state_mix(
    schedule: Schedule,
    arrays: StateArrays,
    position: v.Expr,
    number: v.Expr | None,
    tokens: v.Expr | None,
) -> None:
    """Mix the first ``tokens`` of a sequence, or the one that has a ``number`` among others; it
    stands at ``position``.

    A sequence that begins, at position 0, begins with a state of zeros."""
    shape, spec = arrays.shape, schedule.spec
    first = T.int32(0) if number is None else number
    count = T.int32(1) if tokens is None else tokens
    with T.If(position == 0), T.Then():
        _emit_clear(arrays.tail, shape.kept)
        _emit_clear(arrays.memory, shape.memory)
    if shape.kind == "convolution":
        _emit_gated_convolution(arrays, first, count)
        return
    _emit_convolution(arrays, first, count)
    if arrays.scan is not None:
        emit_scan(schedule, arrays.scan, number, tokens)
        return
    _emit_ranks(schedule, arrays, number, tokens)
    emit_each_token(count, lambda step: _emit_factors(arrays, v.let(first + step)))
    _emit_recurrence(arrays, first, count)
    finish = _emit_mamba_norm if shape.kind == "mamba" else _emit_head_norms
    emit_each_token(count, lambda step: finish(spec, arrays, v.let(first + step)))


def _emit_clear(buffer: v.Buffer, size: int) -> None:
    if size == 0:
        return
    lanes = count_lanes(size)
    with T.serial(size // lanes) as step:
        v.store(buffer, step * lanes, v.constant(0.0, "float32", lanes), lanes)


class _Window:
    def __init__(self, arrays: StateArrays, base: v.Expr, lanes: int) -> None:
        self._arrays, self._base, self._lanes = arrays, base, lanes
        shape = arrays.shape
        self._earlier = [
            v.Cell(v.load(arrays.tail, base + step * shape.channels, lanes))
            for step in range(shape.kernel - 1)
        ]
        self._weights = [
            v.let(v.load(arrays.convolution, base + step * shape.channels, lanes))
            for step in range(shape.kernel)
        ]

    def take(self, value: v.Expr) -> v.Expr:
        """Return the sum of the window that ends with ``value``."""
        total = value * self._weights[-1]
        bias = self._arrays.convolution_bias
        if bias is not None:
            total = total + v.load(bias, self._base, self._lanes)
        for cell, weight in zip(self._earlier, self._weights, strict=False):
            total = T.fma(cell.get(), weight, total)
        total = v.let(total)
        for cell, following in zip(self._earlier, self._earlier[1:], strict=False):
            cell.set(following.get())
        if self._earlier:
            self._earlier[-1].set(value)
        return total

    def keep(self) -> None:
        """Store the last inputs for the tokens that follow."""
        for step, cell in enumerate(self._earlier):
            place = self._base + step * self._arrays.shape.channels
            v.store(self._arrays.tail, place, cell.get(), self._lanes)


def _emit_convolution(arrays: StateArrays, first: v.Expr, count: v.Expr) -> None:
    """Replace the convolution's input by SiLU of its output, in the first Mamba in its result."""
    shape = arrays.shape
    lanes = count_lanes(shape.channels)
    target = arrays.projected if arrays.scan is None else arrays.mixed.values
    find = arrays.find_row if arrays.scan is None else arrays.find_result

    def convolve(task: v.Expr) -> None:
        base = v.let(task * lanes)
        window = _Window(arrays, base, lanes)
        with T.serial(count) as step:
            place = v.let(arrays.find_row(first + step) + base)
            total = window.take(v.let(v.load(arrays.projected, place, lanes)))
            v.store(target, find(first + step) + base, v.take_silu(total, lanes), lanes)
        window.keep()

    emit_shared(shape.channels // lanes, v.wide(count) * (8 * shape.channels), convolve)


def _emit_gated_convolution(arrays: StateArrays, first: v.Expr, count: v.Expr) -> None:
    shape = arrays.shape
    lanes = count_lanes(shape.width)

    def convolve(task: v.Expr) -> None:
        base = v.let(task * lanes)
        window = _Window(arrays, base, lanes)
        with T.serial(count) as step:
            place = v.let(arrays.find_row(first + step) + base)
            before, after, value = (
                v.let(v.load(arrays.projected, place + part * shape.width, lanes))
                for part in range(3)
            )
            total = window.take(v.let(before * value))
            result = arrays.find_result(first + step) + base
            v.store(arrays.mixed.values, result, after * total, lanes)
        window.keep()

    emit_shared(shape.channels // lanes, v.wide(count) * (16 * shape.channels), convolve)


def _emit_ranks(
    schedule: Schedule, arrays: StateArrays, first: v.Expr | None, count: v.Expr | None
) -> None:
    """Set the decays and gates of the first ``count`` tokens, or of the one whose number is
    ``first``, that are made of fewer elements."""
    shape, threads = arrays.shape, schedule.spec.threads
    origin = T.int32(0) if first is None else first

    def store_decay(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = arrays.find_factors(v.let(origin + token)) + (row + shape.value_heads)
        v.store(arrays.gates, place, value, 1)

    def store_gate(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = arrays.find_row(v.let(origin + token)) + v.wide(row + shape.channels)
        v.store(arrays.projected, place, value, 1)

    for own, store in ((arrays.decays, store_decay), (arrays.output_gates, store_gate)):
        if own is not None:
            emit_multiply(schedule.isa, threads, own.matrix, own.ranks, count, store, first)


def _emit_factors(arrays: StateArrays, token: v.Expr) -> None:
    """Turn a token's gates into b and a of every value head; normalise queries and keys."""
    shape, gates = arrays.shape, arrays.gates
    assert arrays.decay is not None and arrays.step is not None
    heads = shape.value_heads
    base = arrays.find_factors(token)
    with T.serial(heads * arrays.once) as head:
        place = v.let(base + head)
        if shape.kind == "delta":
            entry = v.let(v.take_sigmoid(gates[place], 1))
        if shape.decay_of == "key":
            _emit_key_decays(arrays, base, head)
        else:
            size = v.let(v.take_softplus(gates[place + heads] + arrays.step[head], 1))
        if shape.kind != "delta":
            size = v.let(T.max(size, v.constant(shape.shortest_step, "float32")))
            if shape.longest_step is not None:
                size = v.let(T.min(size, v.constant(shape.longest_step, "float32")))
            entry = size
        v.store(gates, place, entry, 1)
        if shape.decay_of == "head":
            v.store(gates, place + heads, v.take_exponential(arrays.decay[head] * size, 1), 1)
    if shape.kind == "delta":
        _emit_key_norms(arrays, token)


def _emit_key_decays(arrays: StateArrays, base: v.Expr, head: v.Expr) -> None:
    """Turn what a token's factors, from ``base`` on, have of a head's decays into a, of every
    element of its keys."""
    shape, gates = arrays.shape, arrays.gates
    assert arrays.decay is not None and arrays.step is not None
    lanes = count_lanes(shape.key_dim)
    rate = v.let(v.splat(arrays.decay[head], lanes))
    with T.serial(shape.key_dim // lanes * arrays.once) as step:
        own = v.let(head * shape.key_dim + step * lanes)
        place = v.let(base + shape.value_heads + own)
        size = v.let(v.load(gates, place, lanes) + v.load(arrays.step, own, lanes))
        if shape.decay_floor is None:
            power = rate * v.take_softplus(size, lanes)
        else:
            # Rates are stored with a sign.
            share = v.take_sigmoid(v.let(v.constant(0.0, "float32", lanes) - rate * size), lanes)
            power = v.constant(shape.decay_floor, "float32", lanes) * share
        v.store(gates, place, v.take_exponential(v.let(power), lanes), lanes)


def _emit_key_norms(arrays: StateArrays, token: v.Expr) -> None:
    shape = arrays.shape
    lanes = count_lanes(shape.key_dim)
    row = arrays.find_row(token)
    for origin, factor in ((0, 1.0 / math.sqrt(shape.key_dim)), (shape.key_heads, 1.0)):
        with T.serial(shape.key_heads * arrays.once) as head:
            base = v.let(row + v.wide((head + origin) * shape.key_dim))
            total = _add_squares(arrays, arrays.projected, base, shape.key_dim, lanes)
            root = T.sqrt(total + v.constant(1e-6, "float32"))
            scale = v.let(v.constant(factor, "float32") / root)
            with T.serial(shape.key_dim // lanes * arrays.once) as step:
                place = v.let(base + v.wide(step * lanes))
                part = v.load(arrays.projected, place, lanes) * v.splat(scale, lanes)
                v.store(arrays.projected, place, part, lanes)


def _add_squares(
    arrays: StateArrays, buffer: v.Buffer, base: v.Expr, size: int, lanes: int
) -> v.Expr:
    """Return the sum of squares of ``size`` elements from ``base`` on."""
    squares = v.Cell(v.constant(0.0, "float32", lanes))
    with T.serial(size // lanes * arrays.once) as step:
        part = v.let(v.load(buffer, base + v.wide(step * lanes), lanes))
        squares.set(T.fma(part, part, squares.get()))
    return v.let(v.add_lanes(squares.get(), "float32", lanes))


def _emit_recurrence(arrays: StateArrays, first: v.Expr, count: v.Expr) -> None:
    shape = arrays.shape
    lanes = count_lanes(shape.value_dim)
    blocks = shape.value_dim // lanes

    def recur(task: v.Expr) -> None:
        head = v.let(T.floordiv(task, blocks))
        block = v.let(T.floormod(task, blocks))
        memory = v.let(v.wide(task) * (shape.key_dim * lanes))
        with T.serial(count) as step:
            _emit_token(arrays, v.let(first + step), head, block, memory, lanes)

    traffic = 8 * shape.memory
    emit_shared(shape.value_heads * blocks, v.wide(count) * traffic, recur)


def _emit_token(
    arrays: StateArrays, token: v.Expr, head: v.Expr, block: v.Expr, memory: v.Expr, lanes: int
) -> None:
    shape, projected, gates = arrays.shape, arrays.projected, arrays.gates
    keys = shape.key_heads * shape.key_dim
    together = shape.value_heads // shape.key_heads
    turns = math.gcd(shape.key_dim, 4)
    zeros = v.constant(0.0, "float32", lanes)
    row = arrays.find_row(token)
    query = v.let(row + v.wide(T.floordiv(head, together) * shape.key_dim))
    key = v.let(query + keys)
    inside = v.let(head * shape.value_dim + block * lanes)
    value = v.let(v.load(projected, row + v.wide(inside + 2 * keys), lanes))
    factors = v.let(arrays.find_factors(token) + head)
    of_keys = shape.decay_of == "key"
    decays = v.let(arrays.find_factors(token) + shape.value_heads)
    if of_keys:
        decays = v.let(decays + head * shape.key_dim)
    else:
        decay = v.let(v.splat(gates[decays + head], lanes))
    added = value
    if shape.kind == "delta":
        known = [v.Cell(zeros) for _ in range(turns)]
        with T.serial(shape.key_dim // turns * arrays.once) as step:
            for turn, cell in enumerate(known):
                number = v.let(step * turns + turn)
                at = v.let(v.wide(number))
                part = v.load(arrays.memory, memory + at * lanes, lanes)
                weight = projected[key + at]
                if of_keys:
                    weight = weight * gates[decays + number]
                cell.set(T.fma(part, v.splat(weight, lanes), cell.get()))
        added = value - (_add_cells(known) if of_keys else _add_cells(known) * decay)
    added = v.let(added * v.splat(gates[factors], lanes))
    results = [v.Cell(zeros) for _ in range(turns)]
    with T.serial(shape.key_dim // turns * arrays.once) as step:
        for turn, cell in enumerate(results):
            number = v.let(step * turns + turn)
            at = v.let(v.wide(number))
            place = v.let(memory + at * lanes)
            if of_keys:
                decay = v.splat(gates[decays + number], lanes)
            old = v.load(arrays.memory, place, lanes) * decay
            new = v.let(T.fma(added, v.splat(projected[key + at], lanes), old))
            v.store(arrays.memory, place, new, lanes)
            cell.set(T.fma(new, v.splat(projected[query + at], lanes), cell.get()))
    result = _add_cells(results)
    if arrays.skip is not None:
        result = result + value * v.splat(arrays.skip[head], lanes)
    v.store(arrays.mixed.values, arrays.find_result(token) + v.wide(inside), result, lanes)


def _add_cells(cells: list[v.Cell]) -> v.Expr:
    total = cells[0].get()
    for cell in cells[1:]:
        total = total + cell.get()
    return total


def _emit_head_norms(spec: KernelSpec, arrays: StateArrays, token: v.Expr) -> None:
    shape, values = arrays.shape, arrays.mixed.values
    activate = v.take_silu if shape.gate == "silu" else v.take_sigmoid
    assert arrays.norm is not None
    lanes = count_lanes(shape.value_dim)
    gates = v.let(arrays.find_row(token) + shape.channels)
    result = arrays.find_result(token)
    with T.serial(shape.value_heads * arrays.once) as head:
        inside = v.let(v.wide(head * shape.value_dim))
        factor = _invert_root(spec, arrays, v.let(result + inside), shape.value_dim, lanes)
        with T.serial(shape.value_dim // lanes * arrays.once) as step:
            at = v.let(v.wide(step * lanes))
            place = v.let(result + inside + at)
            part = v.load(values, place, lanes) * v.splat(factor, lanes)
            part = part * v.load(arrays.norm, at, lanes)
            gate = v.let(v.load(arrays.projected, gates + inside + at, lanes))
            v.store(values, place, part * activate(gate, lanes), lanes)


def _emit_mamba_norm(spec: KernelSpec, arrays: StateArrays, token: v.Expr) -> None:
    shape, values = arrays.shape, arrays.mixed.values
    assert arrays.norm is not None
    size = shape.width // shape.norm_groups
    lanes = count_lanes(size)
    gates = v.let(arrays.find_row(token) + shape.channels)
    result = arrays.find_result(token)
    with T.serial(shape.width // lanes * arrays.once) as step:
        at = v.let(v.wide(step * lanes))
        gate = v.let(v.load(arrays.projected, gates + at, lanes))
        part = v.load(values, result + at, lanes) * v.take_silu(gate, lanes)
        v.store(values, result + at, part, lanes)
    with T.serial(shape.norm_groups * arrays.once) as group:
        inside = v.let(v.wide(group * size))
        factor = _invert_root(spec, arrays, v.let(result + inside), size, lanes)
        with T.serial(size // lanes * arrays.once) as step:
            at = v.let(inside + v.wide(step * lanes))
            part = v.load(values, result + at, lanes) * v.splat(factor, lanes)
            v.store(values, result + at, part * v.load(arrays.norm, at, lanes), lanes)


def _invert_root(
    spec: KernelSpec, arrays: StateArrays, base: v.Expr, size: int, lanes: int
) -> v.Expr:
    """Return 1 / sqrt(mean of squares + epsilon) of ``size`` mixed elements from ``base`` on."""
    total = _add_squares(arrays, arrays.mixed.values, base, size, lanes)
    mean = total * v.constant(1.0 / size, "float32") + v.constant(spec.norm.epsilon, "float32")
    return v.let(v.constant(1.0, "float32") / T.sqrt(mean))
