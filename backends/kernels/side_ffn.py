"""Parts next to a layer's neurons: the router, experts of another width, and an FFN."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.kv import count_lanes
from pi2.backends.kernels.matrix import (
    Matrix,
    emit_multiply,
    emit_quantize,
    emit_shared,
    emit_split,
)
from pi2.backends.kernels.neurons import activate, activate_smoothly, emit_leave_lane_order
from pi2.backends.kernels.norms import NormWeights, emit_add_normalized, emit_fill, emit_normalize
from pi2.backends.kernels.operands import LINE, Activations
from pi2.backends.kernels.schedule import Schedule, emit_each_token, take_matrix
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.documents.model_parts import Moe
from pi2.plan.weights.layout import fill_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentExperts:
    """One of the two projections, and the vectors of the experts' width."""

    schedule: Schedule
    matrix: Matrix
    inner: Activations
    """Input of the experts, and later their output."""

    def emit_lead(self, hidden: Activations, tokens: v.Expr) -> None:
        """Set what experts read of ``tokens``, of what the FFN reads."""
        spec, inner = self.schedule.spec, self.inner

        def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            # Zeros fill the last group up: nobody writes there.
            v.store(inner.values, token * inner.length + row, value, 1)

        emit_multiply(self.schedule.isa, spec.threads, self.matrix, hidden, tokens, store)
        emit_each_token(tokens, lambda token: emit_quantize(inner, token))

    def emit_back(self, y: v.Buffer, x: v.Buffer, tokens: v.Expr) -> None:
        """Add what experts give, y [tokens, width] in lane order, to x."""
        spec, inner = self.schedule.spec, self.inner

        def prepare(token: v.Expr) -> None:
            emit_fill(inner.values, v.let(token * inner.length), inner.length)
            emit_leave_lane_order(inner.length, spec.precision.ffn, y, inner.values, token)
            emit_quantize(inner, token)

        def add(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            place = v.let(token * spec.hidden + row)
            factor = v.constant(spec.model.multipliers.residual, "float32")
            v.store(x, place, T.fma(value, factor, x[place]), 1)

        emit_each_token(tokens, prepare)
        emit_multiply(self.schedule.isa, spec.threads, self.matrix, inner, tokens, add)


def take_latent_experts(
    schedule: Schedule, take: Parameters, tokens: v.Expr, name: str
) -> LatentExperts | None:
    """Declare the projection ``name``, ``experts_in`` or ``experts_out``; None for models whose
    experts have the width of the residual stream."""
    spec, width = schedule.spec, schedule.spec.neuron_width
    if not spec.latent_experts:
        return None
    rows, length = {
        "experts_in": (spec.latent_experts, spec.hidden),
        "experts_out": (spec.hidden, width),
    }[name]
    return LatentExperts(
        schedule=schedule,
        matrix=take_matrix(take, name, rows, length, spec.precision.attention),
        inner=schedule.take_chunk(take, "experts", width, tokens),
    )


ROWS = 4
"""Rows that share the loads of a token."""
TOKENS = 2
"""Tokens that share the loads of rows, if there are several."""
AHEAD_BYTES = 2048
"""How far ahead of the row in use memory is asked for more."""
_LOWEST = -3.0e38


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterArrays:
    """float32 in flat buffers."""

    inputs: v.Buffer
    """[tokens, hidden]."""
    rows: v.Buffer
    """[experts, hidden]."""
    bias: v.Buffer | None
    """[experts], added to scores."""
    choice_bias: v.Buffer | None
    """[experts], added to weights or scores to choose by."""
    shared: v.Buffer | None
    """[hidden], the router of the shared experts."""
    routes: v.Buffer
    """[tokens, all experts]: scores first, then weights."""


def emit_route_tokens(spec: KernelSpec, arrays: RouterArrays, tokens: v.Expr) -> None:
    router, threads = spec.router, spec.threads
    assert router is not None

    def emit_scores(thread: v.Expr) -> None:
        begin, end = emit_split(thread, threads, T.int32(router.experts))
        with T.serial(T.floordiv(end - begin + (ROWS - 1), ROWS)) as step:
            # The last row stands for those beyond it, and its score is stored again.
            rows = [v.let(T.min(begin + step * ROWS + index, end - 1)) for index in range(ROWS)]
            with T.If(tokens == 1):
                with T.Then():
                    _emit_products(spec, arrays, rows, [T.int32(0)])
                with T.Else(), T.serial(T.floordiv(tokens + (TOKENS - 1), TOKENS)) as tile:
                    first = v.let(tile * TOKENS)
                    named = [v.let(T.min(first + index, tokens - 1)) for index in range(TOKENS)]
                    _emit_products(spec, arrays, rows, named)

    emit_shared(threads, router.experts * spec.hidden * 4, emit_scores)
    emit_each_token(tokens, lambda token: _emit_weights(spec, router, arrays, token))


def _emit_products(
    spec: KernelSpec, arrays: RouterArrays, rows: list[v.Expr], tokens: list[v.Expr]
) -> None:
    zero, hidden = v.constant(0.0, "float32", 16), spec.hidden
    cells = [[v.Cell(zero) for _ in tokens] for _ in rows]
    with T.serial(hidden // 16) as step:
        place = v.let(step * 16)
        values = [v.let(v.load(arrays.inputs, token * hidden + place, 16)) for token in tokens]
        for row, sums in zip(rows, cells, strict=True):
            at = v.let(row * hidden + place)
            v.prefetch(arrays.rows, at + AHEAD_BYTES // 4)
            weights = v.let(v.load(arrays.rows, at, LINE // 4))
            for value, cell in zip(values, sums, strict=True):
                cell.set(T.fma(weights, value, cell.get()))
    for row, sums in zip(rows, cells, strict=True):
        for token, cell in zip(tokens, sums, strict=True):
            score = v.add_lanes(cell.get(), "float32", 16)
            if arrays.bias is not None:
                score = score + arrays.bias[row]
            v.store(arrays.routes, token * spec.experts + row, score, 1)


def _emit_weights(spec: KernelSpec, router: Moe, arrays: RouterArrays, token: v.Expr) -> None:
    routes, base = arrays.routes, v.let(token * spec.experts)
    if router.choice_bias_of != "score":
        _emit_shares(router, routes, base)
    chosen = T.alloc_buffer((router.active_experts,), "int32")
    shares = T.alloc_buffer((router.active_experts,), "float32")
    zero, lowest = v.constant(0.0, "float32"), v.constant(_LOWEST, "float32")
    # The best of those that come after the last one: lower, or equal and further on.
    last, last_place = v.Cell(v.constant(-_LOWEST, "float32")), v.Cell(T.int32(-1))
    total = v.Cell(zero)
    with T.serial(router.active_experts) as turn:
        best, best_place = v.Cell(lowest), v.Cell(T.int32(0))
        with T.serial(router.experts) as expert:
            wanted = routes[base + expert]
            if arrays.choice_bias is not None:
                wanted = wanted + arrays.choice_bias[expert]
            worth = v.let(wanted)
            comes = T.Or(worth < last.get(), T.And(worth == last.get(), expert > last_place.get()))
            with T.If(T.And(comes, worth > best.get())), T.Then():
                best.set(worth)
                best_place.set(expert)
        last.set(best.get())
        last_place.set(best_place.get())
        share = v.let(routes[base + best_place.get()])
        if router.choice_bias_of == "score":
            share = v.let(v.take_sigmoid(share, 1))
        v.store(chosen, turn, best_place.get(), 1)
        v.store(shares, turn, share, 1)
        total.set(total.get() + share)
    factor = v.constant(router.scaling, "float32")
    if router.normalise_weights:
        factor = v.let(factor / T.max(total.get(), v.constant(1e-20, "float32")))
    with T.serial(spec.experts) as expert:
        v.store(routes, base + expert, zero, 1)
    with T.serial(router.active_experts) as turn:
        v.store(routes, base + chosen[turn], shares[turn] * factor, 1)
    if router.shared_experts:
        weight = v.constant(router.shared_factor, "float32")
        if arrays.shared is not None:
            share = v.take_sigmoid(_multiply_shared(spec, arrays, token), 1)
            weight = v.let(share * weight if router.shared_factor != 1.0 else share)
        with T.serial(router.shared_experts) as expert:
            v.store(routes, base + router.experts + expert, weight, 1)


def _emit_shares(router: Moe, routes: v.Buffer, base: v.Expr) -> None:
    """Turn scores from ``base`` on into shares: softmax over all, or the sigmoid of each."""
    steps, rest = divmod(router.experts, 16)
    parts = [(step * 16, 16) for step in range(steps)]
    parts += [(steps * 16 + index, 1) for index in range(rest)]
    if router.router == "sigmoid":
        for place, lanes in parts:
            share = v.take_sigmoid(v.load(routes, base + place, lanes), lanes)
            v.store(routes, base + place, share, lanes)
        return
    largest = v.Cell(v.constant(_LOWEST, "float32"))
    with T.serial(router.experts) as expert:
        largest.set(T.max(largest.get(), routes[base + expert]))
    total = v.Cell(v.constant(0.0, "float32"))
    for place, lanes in parts:
        shifted = v.load(routes, base + place, lanes) - v.splat(largest.get(), lanes)
        share = v.let(v.take_exponential(shifted, lanes))
        total.set(total.get() + v.add_lanes(share, "float32", lanes))
        v.store(routes, base + place, share, lanes)
    inverse = v.let(v.constant(1.0, "float32") / total.get())
    for place, lanes in parts:
        share = v.load(routes, base + place, lanes) * v.splat(inverse, lanes)
        v.store(routes, base + place, share, lanes)


def _multiply_shared(spec: KernelSpec, arrays: RouterArrays, token: v.Expr) -> v.Expr:
    assert arrays.shared is not None
    cell = v.Cell(v.constant(0.0, "float32", 16))
    with T.serial(spec.hidden // 16) as step:
        value = v.load(arrays.inputs, token * spec.hidden + step * 16, 16)
        cell.set(T.fma(v.load(arrays.shared, step * 16, 16), value, cell.get()))
    return v.let(v.add_lanes(cell.get(), "float32", 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class SideNorms:
    """Norms of such an FFN and of the experts next to it."""

    spec: KernelSpec
    input: NormWeights
    weight: v.Buffer
    """Of what the FFN gives."""
    experts: v.Buffer
    output: v.Buffer
    """What the FFN gives float32 [tokens, hidden]."""

    def emit_join(self, experts: v.Buffer, total: v.Buffer, token: v.Expr, once: v.Expr) -> None:
        """Set ``total`` of ``token`` to the norms of what the ``experts`` and the FFN give."""
        spec = self.spec
        emit_fill(total, v.let(token * spec.hidden), spec.hidden)
        emit_add_normalized(spec, experts, total, self.experts, once, token)
        emit_add_normalized(spec, self.output, total, self.weight, once, token)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFfn:
    """Its weights, and room to work in."""

    schedule: Schedule
    rows: Matrix
    """Gates, if neurons have them, then ups [terms, hidden]."""
    down: Matrix
    hidden: Activations
    """Input of the router; its own, if it has norms of its own."""
    inner: Activations
    terms: v.Buffer
    """Products with gates and ups float32 [tokens, terms]."""
    norms: SideNorms | None

    def emit(self, x: v.Buffer, tokens: v.Expr) -> None:
        """Add its output to x of all tokens, as attention has left it, or keep it for its norm."""
        spec, isa = self.schedule.spec, self.schedule.isa
        width, terms = spec.side_ffn, (1 + spec.ffn.gated) * spec.side_ffn

        def store_term(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(self.terms, token * terms + row, value, 1)

        def store_output(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            place = v.let(token * spec.hidden + row)
            if self.norms is not None:
                v.store(self.norms.output, place, value, 1)
                return
            factor = v.constant(spec.model.multipliers.residual, "float32")
            v.store(x, place, T.fma(value, factor, x[place]), 1)

        lanes = count_lanes(width) if spec.is_smooth and spec.ffn.limit is None else 1

        def finish(token: v.Expr) -> None:
            # Zeros fill the last group up: nobody writes there.
            with T.serial(width // lanes * self.inner.once) as step:
                place = v.let(token * terms + step * lanes)
                gate = v.let(v.load(self.terms, place, lanes))
                up = v.let(v.load(self.terms, place + width, lanes)) if spec.ffn.gated else None
                if lanes == 1:
                    value = activate(spec, gate, up)
                else:
                    value = activate_smoothly(spec, gate, lanes)
                    value = value if up is None else value * up
                v.store(self.inner.values, token * self.inner.length + step * lanes, value, lanes)
            emit_quantize(self.inner, token)

        if self.norms is not None:
            norm = self.norms.input
            emit_each_token(
                tokens, lambda token: emit_normalize(spec, x, token, norm, self.hidden, token)
            )
        emit_multiply(isa, spec.threads, self.rows, self.hidden, tokens, store_term)
        emit_each_token(tokens, finish)
        emit_multiply(isa, spec.threads, self.down, self.inner, tokens, store_output)


def take_side_ffn(schedule: Schedule, take: Parameters, tokens: v.Expr) -> SideFfn | None:
    """Declare the parameters; None for models without such an FFN."""
    spec = schedule.spec
    width, hidden = spec.side_ffn, spec.hidden
    if not width:
        return None
    norms, terms = None, (1 + spec.ffn.gated) * width
    if spec.side_norms:
        norms = SideNorms(
            spec=spec,
            input=NormWeights(weight=take.take_array("side_norm", "float32", hidden), bias=None),
            weight=take.take_array("side_output_norm", "float32", hidden),
            experts=take.take_array("experts_output_norm", "float32", hidden),
            output=schedule.take_rows(take, "side_output"),
        )
    return SideFfn(
        schedule=schedule,
        rows=take_matrix(take, "side_in", terms, hidden, spec.precision.attention),
        down=take_matrix(take, "side_down", hidden, fill_groups(width), spec.precision.attention),
        hidden=schedule.take_chunk(take, "hidden", hidden, tokens),
        inner=schedule.take_chunk(take, "side_inner", fill_groups(width), tokens),
        terms=take.take_array("side_terms", "float32", "tokens", terms),
        norms=norms,
    )
