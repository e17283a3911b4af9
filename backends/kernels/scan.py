"""The first Mamba's recurrence (Gu and Dao 2023), whose step sizes, B and C are made of the
convolved values.

The state of a channel is a vector S [key_dim]. For every token, with the channel's value v and step
size s, rates of decay A, B, C, skip and gate z::

    S = exp(s A) S + s v B;  result = (C . S + skip v) silu(z)

Channels do not depend on each other: a task takes some of them through all tokens of a chunk. The
two projections inside are multiplied in float32: they make step sizes, whose errors would multiply
up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.kv import count_lanes
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_shared
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.schedule import Schedule, emit_each_token, take_matrix
from pi2.model.states import StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanArrays:
    """Inputs and outputs of the recurrence; flat float32 buffers except the matrices.

    ``projected`` [tokens, 2 width]: values, and gates; ``mixed``: the convolved values, which
    become the result; ``factors`` [tokens, width + 2 key_dim]: step sizes, B and C; ``memory``
    [width / lanes, key_dim, lanes]; ``decay`` [key_dim, width]."""

    shape: StateShape
    projected: v.Buffer
    mixed: Activations
    factors: v.Buffer
    memory: v.Buffer
    decay: v.Buffer
    step: v.Buffer
    skip: v.Buffer
    parts: Matrix
    """From convolved values to the latents of step sizes, B and C."""
    part_norm: v.Buffer | None
    """Weights of their norms [step_rank + 2 key_dim]."""
    ranks: Activations
    """Latents of step sizes; only values."""
    steps: Matrix
    """That to step sizes."""

    def find_factors(self, token: v.Expr) -> v.Expr:
        """Return where the step sizes, B and C of a token begin."""
        return v.let(v.wide(token) * (self.shape.width + 2 * self.shape.key_dim))

    def find_result(self, token: v.Expr) -> v.Expr:
        return v.let(v.wide(token) * self.shape.stored_width)


def take_scan(
    take: Parameters,
    shape: StateShape,
    mixed: Activations,
    projected: v.Buffer,
    factors: v.Buffer,
    memory: v.Buffer,
) -> ScanArrays:
    """Declare the parameters that no other kind of state has."""
    width, rank = shape.width, shape.stored_rank
    ranks = take.take_array("state_ranks", "float32", "tokens", rank)
    part_norm = None
    if shape.part_norm == "weighted":
        part_norm = take.take_array("state_part_norm", "float32", shape.parts)
    return ScanArrays(
        shape=shape,
        projected=projected,
        mixed=mixed,
        factors=factors,
        memory=memory,
        decay=take.take_array("state_decay", "float32", shape.key_dim, width),
        step=take.take_array("state_step", "float32", width),
        skip=take.take_array("state_skip", "float32", width),
        parts=take_matrix(take, "state_parts", shape.parts, shape.stored_width, "fp16"),
        part_norm=part_norm,
        ranks=mixed.keep_values(ranks, rank),
        steps=take_matrix(take, "state_steps", width, rank, "fp16"),
    )


def emit_scan(
    schedule: Schedule, arrays: ScanArrays, first: v.Expr | None, count: v.Expr | None
) -> None:
    """Take the first ``count`` tokens, or the one whose number is ``first``, through the state."""
    origin = T.int32(0) if first is None else first
    tokens = T.int32(1) if count is None else count
    _emit_parts(schedule, arrays, origin, first, count)
    emit_each_token(tokens, lambda step: _emit_norms(arrays, v.let(origin + step)))
    _emit_steps(schedule, arrays, origin, first, count)
    _emit_recurrence(arrays, origin, tokens)


def _emit_parts(
    schedule: Schedule,
    arrays: ScanArrays,
    origin: v.Expr,
    first: v.Expr | None,
    count: v.Expr | None,
) -> None:
    shape, threads = arrays.shape, schedule.spec.threads

    def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        own = v.let(origin + token)
        with T.If(row < shape.step_rank):
            with T.Then():
                v.store(arrays.ranks.values, own * shape.stored_rank + row, value, 1)
            with T.Else():
                place = arrays.find_factors(own) + v.wide(row + (shape.width - shape.step_rank))
                v.store(arrays.factors, place, value, 1)

    emit_multiply(schedule.isa, threads, arrays.parts, arrays.mixed, count, store, first)


def _emit_steps(
    schedule: Schedule,
    arrays: ScanArrays,
    origin: v.Expr,
    first: v.Expr | None,
    count: v.Expr | None,
) -> None:
    threads = schedule.spec.threads

    def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        place = arrays.find_factors(v.let(origin + token)) + v.wide(row)
        v.store(arrays.factors, place, v.take_softplus(value + arrays.step[row], 1), 1)

    emit_multiply(schedule.isa, threads, arrays.steps, arrays.ranks, count, store, first)


def _emit_norms(arrays: ScanArrays, token: v.Expr) -> None:
    shape = arrays.shape
    if shape.part_norm == "none":
        return
    keys = v.let(arrays.find_factors(token) + shape.width)
    rank, size = shape.step_rank, shape.key_dim
    _emit_norm(arrays, arrays.ranks.values, v.let(v.wide(token) * shape.stored_rank), rank, 0)
    _emit_norm(arrays, arrays.factors, keys, size, rank)
    _emit_norm(arrays, arrays.factors, v.let(keys + size), size, rank + size)


def _emit_norm(arrays: ScanArrays, buffer: v.Buffer, base: v.Expr, size: int, weights: int) -> None:
    """Normalise ``size`` elements from ``base`` on; their weights begin with ``weights``."""
    lanes, once = count_lanes(size), arrays.mixed.once
    squares = v.Cell(v.constant(0.0, "float32", lanes))
    with T.serial(size // lanes * once) as step:
        part = v.let(v.load(buffer, base + v.wide(step * lanes), lanes))
        squares.set(T.fma(part, part, squares.get()))
    total = v.add_lanes(squares.get(), "float32", lanes)
    mean = total * v.constant(1.0 / size, "float32")
    root = T.sqrt(mean + v.constant(arrays.shape.part_epsilon, "float32"))
    factor = v.let(v.constant(1.0, "float32") / root)
    with T.serial(size // lanes * once) as step:
        place = v.let(base + v.wide(step * lanes))
        part = v.load(buffer, place, lanes) * v.splat(factor, lanes)
        if arrays.part_norm is not None:
            part = part * v.load(arrays.part_norm, weights + step * lanes, lanes)
        v.store(buffer, place, part, lanes)


def _emit_recurrence(arrays: ScanArrays, origin: v.Expr, tokens: v.Expr) -> None:
    shape = arrays.shape
    lanes = count_lanes(shape.width)

    def scan(task: v.Expr) -> None:
        base = v.let(task * lanes)
        memory = v.let(v.wide(task) * (shape.key_dim * lanes))
        with T.serial(tokens) as step:
            _emit_token(arrays, v.let(origin + step), base, memory, lanes)

    traffic = 8 * shape.memory
    emit_shared(shape.width // lanes, v.wide(tokens) * traffic, scan)


def _emit_token(
    arrays: ScanArrays, token: v.Expr, base: v.Expr, memory: v.Expr, lanes: int
) -> None:
    shape, factors, values = arrays.shape, arrays.factors, arrays.mixed.values
    place = v.let(arrays.find_result(token) + base)
    row = arrays.find_factors(token)
    value = v.let(v.load(values, place, lanes))
    size = v.let(v.load(factors, row + base, lanes))
    entry = v.let(size * value)
    turns = math.gcd(shape.key_dim, 4)
    results = [v.Cell(v.constant(0.0, "float32", lanes)) for _ in range(turns)]
    with T.serial(shape.key_dim // turns * arrays.mixed.once) as step:
        for turn, cell in enumerate(results):
            at = v.let(step * turns + turn)
            rate = v.load(arrays.decay, at * shape.width + base, lanes)
            decay = v.take_exponential(rate * size, lanes)
            kept = v.let(memory + v.wide(at * lanes))
            key = v.let(row + v.wide(at + shape.width))
            old = v.let(v.load(arrays.memory, kept, lanes) * decay)
            new = v.let(T.fma(entry, v.splat(factors[key], lanes), old))
            v.store(arrays.memory, kept, new, lanes)
            cell.set(T.fma(new, v.splat(factors[key + shape.key_dim], lanes), cell.get()))
    result = results[0].get()
    for cell in results[1:]:
        result = result + cell.get()
    result = T.fma(value, v.load(arrays.skip, base, lanes), result)
    gates = v.let(v.wide(token) * shape.entries + shape.channels)
    gate = v.let(v.load(arrays.projected, gates + base, lanes))
    v.store(values, place, result * v.take_silu(gate, lanes), lanes)
