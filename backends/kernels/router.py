"""The router of a mixture: weights of all experts for every token, 0 for those that rest.

A token's products are added up in the same order however many tokens there are, so that it is
routed alike alone and in company.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.matrix import emit_shared, emit_split
from pi2.backends.kernels.parameters import emit_each_token
from pi2.backends.kernels.requests import LINE
from pi2.backends.kernels.spec import KernelSpec, RouterShape

ROWS = 4
"""Rows that share the loads of a token."""
TOKENS = 2
"""Tokens that share the loads of rows, where there are several."""
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
    """Set the routes of all tokens."""
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
    """Set the scores of some rows for some tokens."""
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


def _emit_weights(
    spec: KernelSpec, router: RouterShape, arrays: RouterArrays, token: v.Expr
) -> None:
    """Turn a token's scores into weights."""
    routes, base = arrays.routes, v.let(token * spec.experts)
    if not router.chooses_scores:
        _emit_shares(router, routes, base)
    chosen = T.alloc_buffer((router.active,), "int32")
    shares = T.alloc_buffer((router.active,), "float32")
    zero, lowest = v.constant(0.0, "float32"), v.constant(_LOWEST, "float32")
    # The best of those that come after the last one: lower, or equal and further on.
    last, last_place = v.Cell(v.constant(-_LOWEST, "float32")), v.Cell(T.int32(-1))
    total = v.Cell(zero)
    with T.serial(router.active) as turn:
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
        if router.chooses_scores:
            share = v.let(v.take_sigmoid(share, 1))
        v.store(chosen, turn, best_place.get(), 1)
        v.store(shares, turn, share, 1)
        total.set(total.get() + share)
    factor = v.constant(router.scaling, "float32")
    if router.normalise:
        factor = v.let(factor / T.max(total.get(), v.constant(1e-20, "float32")))
    with T.serial(spec.experts) as expert:
        v.store(routes, base + expert, zero, 1)
    with T.serial(router.active) as turn:
        v.store(routes, base + chosen[turn], shares[turn] * factor, 1)
    if router.shared:
        weight = v.constant(router.shared_factor, "float32")
        if arrays.shared is not None:
            share = v.take_sigmoid(_multiply_shared(spec, arrays, token), 1)
            weight = v.let(share * weight if router.shared_factor != 1.0 else share)
        with T.serial(router.shared) as expert:
            v.store(routes, base + router.experts + expert, weight, 1)


def _emit_shares(router: RouterShape, routes: v.Buffer, base: v.Expr) -> None:
    """Turn scores from ``base`` on into shares: softmax over all, or the sigmoid of each."""
    steps, rest = divmod(router.experts, 16)
    parts = [(step * 16, 16) for step in range(steps)]
    parts += [(steps * 16 + index, 1) for index in range(rest)]
    if router.kind == "sigmoid":
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
    """Return the score of the shared experts."""
    assert arrays.shared is not None
    cell = v.Cell(v.constant(0.0, "float32", 16))
    with T.serial(spec.hidden // 16) as step:
        value = v.load(arrays.inputs, token * spec.hidden + step * 16, 16)
        cell.set(T.fma(v.load(arrays.shared, step * 16, 16), value, cell.get()))
    return v.let(v.add_lanes(cell.get(), "float32", 16))
