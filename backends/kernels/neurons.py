"""What one neuron computes: its activation, and its part of the FFN's output.

The FFN's sum y is kept in *lane order*, the order in which down vectors unpack: within a block of
L lanes, element e of group j stands at ``e * L + j``; fp16 vectors are in natural order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.operands import Prefetch, Vector, list_runs
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.unpacking import Block, find_unpacking
from pi2.formats import find_packing
from pi2.plan.weights.layout import GROUP, PartName, Precision, weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Neuron:
    """First byte of a neuron."""

    base: v.Expr
    """Its bundle, in an array of bundles."""
    scales_base: v.Expr
    """What the offsets of its scales count from where they are resident: its row of them, or what
    the rows of its group have together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """Neurons in memory: ``arena`` uint8 [slots, stride], and ``scales`` uint8 [neurons, scales
    stride] where they are resident, else None; ``table`` uint8 of what codes of gates and ups are
    looked up in, if they are."""

    spec: KernelSpec
    arena: v.Buffer
    scales: v.Buffer | None = None
    table: v.Buffer | None = None

    def find(self, slot: v.Expr, row: v.Expr | None = None) -> Neuron:
        """Return the neuron in ``slot``; resident scales have it in ``row``."""
        base = v.let(v.wide(slot) * self.spec.stride)
        if self.scales is None:
            return Neuron(base=base, scales_base=base)
        assert row is not None
        stride = self.spec.bundle.scales_stride
        if self.spec.bundle.parts[-1].spread:
            row, stride = T.floordiv(row, GROUP), stride * GROUP
        return Neuron(base=base, scales_base=v.let(v.wide(row) * stride))

    def take_part(self, neuron: Neuron, name: PartName) -> Vector:
        part = next(part for part in self.spec.bundle.parts if part.name == name)
        scales_base = neuron.scales_base if part.resident else neuron.base
        factor = self.spec.bundle.factor_offset if name == "down" else None
        inline = self.arena if self.table is None or name == "down" else self.table
        return Vector(
            weights=self.arena,
            weights_base=v.let(neuron.base + part.weights_offset),
            scales=self.scales if part.resident else inline,
            scales_base=v.let(scales_base + part.scales_offset),
            precision=part.precision,
            spread=part.spread,
            factor_base=None if factor is None else neuron.base + factor,
        )

    def take_parts(self, neurons: Sequence[Neuron], names: Sequence[PartName]) -> list[Vector]:
        """Return parts of some neurons, one neuron after the other."""
        return [self.take_part(neuron, name) for neuron in neurons for name in names]

    def load_expert(self, neuron: Neuron) -> v.Expr:
        assert self.spec.bundle.expert_offset is not None
        return v.load_as(self.arena, neuron.base + self.spec.bundle.expert_offset, "int32", 1)


def is_firing(spec: KernelSpec, gate: v.Expr, lanes: int = 1) -> v.Expr:
    """Return whether a neuron with this gate can have an effect (never asked for smooth ones)."""
    assert not spec.is_smooth
    limit = spec.ffn.threshold
    return gate > v.constant(limit, "float32", lanes)


NO_CUTOFF = -3.0e38
"""Stands for the cutoff of layers whose gates have none."""


def close_gate(gate: v.Expr, cutoff: v.Expr, lanes: int = 1) -> v.Expr:
    """Return what ``cutoff`` leaves of gates; all of them where it stands for none."""
    rest = T.max(gate - v.splat(cutoff, lanes), v.constant(0.0, "float32", lanes))
    is_there = v.splat(cutoff, lanes) > v.constant(NO_CUTOFF, "float32", lanes)
    return v.let(T.Select(is_there, rest, gate))


def activate(
    spec: KernelSpec, gate: v.Expr, up: v.Expr | None, cutoff: v.Expr | None = None
) -> v.Expr:
    """Return act(gate) * up as the model defines it, or act(gate) without ``up``; scalars.
    ``cutoff``: the gates' cutoff, if layers have one."""
    zero = v.constant(0.0, "float32")
    if cutoff is not None:
        gate = close_gate(gate, cutoff)
    if spec.is_smooth:
        value = activate_smoothly(spec, v.let(gate))
    else:
        value = v.let(T.Select(is_firing(spec, gate), gate, zero))
        if spec.ffn.activation == "relu2":
            value = value * value
    if up is None:
        return value
    return value * adjust_up(spec, up)


def adjust_up(spec: KernelSpec, up: v.Expr) -> v.Expr:
    """Return what gates are multiplied with; scalars."""
    if spec.ffn.activation == "drelu":
        return T.max(up, v.constant(0.0, "float32"))
    if spec.ffn.limit is not None:
        low, high = (v.constant(side, "float32") for side in (-spec.ffn.limit, spec.ffn.limit))
        up = T.max(T.min(up, high), low)
    return up + v.constant(spec.ffn.up_offset, "float32") if spec.ffn.up_offset else up


def activate_smoothly(spec: KernelSpec, x: v.Expr, lanes: int = 1) -> v.Expr:
    """SiLU, GELU, or its approximation by tanh."""

    def number(literal: float) -> v.Expr:
        return v.constant(literal, "float32", lanes)

    if spec.ffn.activation == "gelu":
        inner = v.take_error_function(x * number(0.5**0.5), lanes)
        return number(0.5) * x * (number(1.0) + inner)
    if spec.ffn.activation == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z).
        cube = number(0.044715) * x * x * x
        exponent = number(2 * (2 / math.pi) ** 0.5) * (x + cube)
    else:
        if spec.ffn.limit is not None:
            x = v.let(T.min(x, number(spec.ffn.limit)))
        exponent = x if spec.ffn.slope == 1.0 else x * number(spec.ffn.slope)
    return x / (number(1.0) + v.take_exponential(number(0.0) - exponent, lanes))


def emit_leave_lane_order(
    hidden: int, precision: Precision, source: v.Buffer, target: v.Buffer, token: v.Expr
) -> None:
    """Add y [tokens, hidden] (lane order) of ``token`` to ``target`` (natural order)."""
    base = v.let(token * hidden)
    if find_packing(precision).is_plain:
        with T.serial(hidden // 16) as step:
            place = base + step * 16
            v.store(target, place, v.load(target, place, 16) + v.load(source, place, 16), 16)
        return
    for lanes, first, count in list_runs(hidden):
        with T.serial(count) as block, T.serial(lanes) as lane:
            _emit_leave_group(source, target, base, v.let(first + block * lanes), lane, lanes)


def _emit_leave_group(
    source: v.Buffer, target: v.Buffer, base: v.Expr, first: v.Expr, lane: v.Expr, lanes: int
) -> None:
    for half in range(2):
        spread = v.span(base + first * GROUP + half * 16 * lanes + lane, 16, lanes)
        place = base + (first + lane) * GROUP + half * 16
        v.store(target, place, v.load(target, place, 16) + source[spread], 16)


def find_neighbour(bundles: Bundles, place: v.Expr, first: v.Expr | None) -> Neuron:
    """Return a neuron of ``bundles`` in stored order; ``first``: row of the first's scales."""
    return bundles.find(place, None if first is None else first + place)


def add_biases(
    bundles: Bundles, neuron: Neuron, dots: Sequence[v.Expr], first: int = 0
) -> list[v.Expr]:
    """Return products of a neuron's parts from number ``first`` on with what the model adds."""
    biases = bundles.spec.bundle.biases[first : first + len(dots)]
    if not biases:
        return list(dots)
    return [
        v.let(dot + v.load_as(bundles.arena, neuron.base + bias.offset, "float32", 1))
        for dot, bias in zip(dots, biases, strict=True)
    ]


def find_value(
    bundles: Bundles,
    neuron: Neuron,
    token: v.Expr,
    terms: Sequence[v.Expr],
    routes: v.Buffer | None,
    cutoffs: v.Buffer | None = None,
) -> v.Expr:
    """Return a neuron's value for a token, of the products of its parts, times the weight of its
    expert; ``cutoffs`` float32 [tokens] of gates, if layers have them."""
    spec, weight = bundles.spec, None
    if routes is not None:
        weight = v.let(routes[token * spec.experts + bundles.load_expert(neuron)])
    if weight is not None and spec.weighs_input:
        terms, weight = [v.let(term * weight) for term in terms], None
    cutoff = None if cutoffs is None else v.let(cutoffs[token])
    value = activate(spec, terms[0], terms[1] if spec.ffn.gated else None, cutoff)
    return value if weight is None else value * weight


def emit_fill(target: v.Buffer, base: v.Expr, length: int) -> None:
    """Set ``target[base : base + length]`` to 0."""
    with T.serial(length // 16) as step:
        v.store(target, base + step * 16, v.constant(0.0, "float32", 16), 16)


def emit_add(
    spec: KernelSpec, partial: v.Buffer, total: v.Buffer, token: v.Expr, first: v.Expr | int = 0
) -> None:
    """Add the sums of all threads, from place ``first`` on, to ``total`` float32 [tokens, hidden]
    of ``token``."""
    hidden = spec.hidden
    with T.serial(hidden // 16) as step:
        sum_place = v.let(token * hidden + step * 16)
        value = v.load(total, sum_place, 16)
        for thread in range(spec.threads):
            value = value + v.load(partial, first + thread * hidden + step * 16, 16)
        v.store(total, sum_place, value, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Sums of the squares of activations: ``total`` float32 [tokens], and ``own`` float32
    [tokens, threads] of each thread, [threads] where there is one token."""

    total: v.Buffer
    own: v.Buffer

    def set_own(self, place: v.Expr, values: v.Buffer, first: v.Expr, count: v.Expr) -> None:
        """Set a thread's sum to the sum of ``count`` of ``values`` from ``first`` on."""
        v.store(self.own, place, add_squares(values, first, count), 1)

    def emit_add(self, threads: int, token: v.Expr, first: v.Expr | int = 0) -> None:
        """Add the sums of all threads, from place ``first`` on, to the sum of ``token``."""
        value = self.total[token]
        for thread in range(threads):
            value = value + self.own[first + thread]
        v.store(self.total, token, value, 1)


def add_squares(values: v.Buffer, first: v.Expr, count: v.Expr) -> v.Expr:
    """Return the sum of the squares of ``count`` of ``values`` from ``first`` on."""
    total = v.Cell(v.constant(0.0, "float32"))
    with T.serial(count) as step:
        value = v.let(values[first + step])
        total.set(T.fma(value, value, total.get()))
    return v.let(total.get())


def emit_count(spec: KernelSpec, counts: v.Buffer) -> None:
    """Add each thread's count to the last of ``counts`` int32 [threads + 1], never reset."""
    threads = spec.threads
    for thread in range(threads):
        v.store(counts, threads, counts[threads] + counts[thread], 1)


def emit_downs(
    isa: Isa,
    spec: KernelSpec,
    weighed: Sequence[tuple[Vector, v.Expr]],
    target: v.Buffer,
    base: v.Expr,
    once: v.Expr,
    ask: Prefetch | None = None,
) -> None:
    """Add each of some down vectors times its value to ``target[base:]`` (lane order), one after
    the other; ``ask`` is told the reads, and their time. ``once``: see `Activations`."""
    unpacking = find_unpacking(spec.precision.ffn)
    size = weight_bytes(GROUP, spec.precision.ffn)

    def emit_block(lanes: int, first: v.Expr) -> None:
        step = unpacking.count_tile_bytes(lanes)
        scales = [
            v.let(unpacking.load_block_scale(Block(vector, lanes, first)) * v.splat(value, lanes))
            for vector, value in weighed
        ]
        for chunk in range(unpacking.tiles):
            tiles = []
            for index, (vector, _) in enumerate(weighed):
                if ask is not None:
                    ask(index, v.wide(first * size) + chunk * step, step)
                tiles.append(unpacking.emit_tile(isa, Block(vector, lanes, first), chunk))
            for rows in zip(*tiles, strict=True):
                at = v.let(base + rows[0][0])
                total = v.load(target, at, lanes)
                for (_, weights), scale in zip(rows, scales, strict=True):
                    total = T.fma(weights, scale, total)
                v.store(target, at, total, lanes)

    for lanes, group, tiles in unpacking.list_tiles(spec.hidden):
        groups = unpacking.count_groups(lanes)
        with T.serial(tiles // unpacking.tiles * once) as block:
            emit_block(lanes, group + block * groups)
