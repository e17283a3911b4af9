"""What one neuron computes: its activation, and its part of the FFN's output.

The FFN's sum y is kept in *lane order*, the order in which down vectors unpack: within a block of
L lanes, element e of group j stands at ``e * L + j``; fp16 vectors are in natural order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.operands import Vector, list_runs
from pi2.backends.kernels.spec import KernelSpec
from pi2.formats import find_packing
from pi2.plan.weights.layout import GROUP, PartName, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Neuron:
    """First byte of a neuron."""

    base: v.Expr
    """Its bundle, in an array of bundles."""
    scales_base: v.Expr
    """What the offsets of its scales count from where they are resident: its row of them, or what
    the rows of its group have together."""
    expert_base: v.Expr | None = None
    """First byte of a neuron of the same expert; None: the neuron itself has it."""


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
        base = neuron.base if neuron.expert_base is None else neuron.expert_base
        return v.load_as(self.arena, base + self.spec.bundle.expert_offset, "int32", 1)


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
