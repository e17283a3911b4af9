"""Another memory budget for a plan: which segments become smaller or larger, and by how much.

Where not all neurons fit, the embedding and the unused part of the context make room for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from pi2.diagnostics import UserError
from pi2.memory.context import describe_context
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_ffn_bytes, reads_embedding
from pi2.plan.checking.splits import list_placed_splits
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    QuantityError,
    approximate_bytes,
    format_bytes,
    parse_quantity,
)

_HOT_PART = 0.5
"""Hot neurons' part of what is left for neurons, where a plan's hot ones do not fit."""
_BLOCK_BYTES = 4096
_WORTHWHILE_NEURONS = 256
"""Room for so many neurons saves more reads than the two that a row of the embedding takes: of the
neurons that a cache just holds, one in a hundred or more is used for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """What a plan becomes."""

    overrides: Mapping[str, object]
    """Values to load the plan with, by key."""
    changes: tuple[str, ...]
    """The changed values in words, one line each."""


def parse_budget(text: str) -> int:
    """Bytes of a text such as ``"3 GiB"``; UserError P612."""
    try:
        size = int(parse_quantity(text, BYTE_UNITS))
    except QuantityError as error:
        raise UserError.of("P612", str(error), help="for example `--memory 3GiB`") from None
    if size < 1:
        raise UserError.of("P612", "the budget is zero", help="for example `--memory 3GiB`")
    return size


def refit_plan(resolved: ResolvedPlan, budget_bytes: int) -> Refit:
    """Fit ``resolved`` into ``budget_bytes``.

    Where some neurons do not fit, rows of the embedding come from flash and the context lends what
    it does not use yet, unless the plan states ``memory.embedding`` or ``kv.lend`` itself.  First
    goes what segments have beyond their needs; then the cold cache, down to the least that
    a layer works with; then hot neurons, of every layer in proportion, so that hot and cold share
    what is left.  A larger budget goes to the cold cache.  Raises UserError P611 if even that does
    not fit.
    """
    segments = resolved.plan.memory.segments
    overrides: dict[str, object] = {"memory.budget": format_bytes(budget_bytes)}
    changes = [_describe("budget", resolved.plan.memory.budget, budget_bytes)]
    if budget_bytes - sum(_size_fixed(resolved).values()) < count_ffn_bytes(resolved):
        resolved, savings = _save_memory(resolved)
        overrides |= {key: value for key, value, _ in savings}
        changes += [f"{key}: {reason}" for key, _, reason in savings]
    needs = {name: need.bytes for name, need in resolved.needs.items()}
    fixed = _size_fixed(resolved)
    room = budget_bytes - sum(fixed.values())
    if room < needs["cold"]:
        raise _explain_shortage(budget_bytes, {**fixed, "cold": needs["cold"]})
    scale, hot_bytes = _choose_hot(resolved, room, needs)
    sizes = {**fixed, "hot": hot_bytes}
    sizes["cold"] = max(0, min(room, count_ffn_bytes(resolved)) - hot_bytes)
    for name in type(segments).model_fields:
        before, after = getattr(segments, name), sizes[name]
        if before != after:
            overrides[f"memory.segments.{name}"] = format_bytes(after)
            changes.append(_describe(name, before, after))
    if scale < 1:
        for key, share in _list_shares(resolved).items():
            fewer = _round_down(share * scale)
            overrides[key] = fewer
            changes.append(f"{key}: {share:g} -> {fewer:g}")
        overrides |= _scale_splits(resolved, scale)
    return Refit(overrides=overrides, changes=tuple(changes))


def _size_fixed(resolved: ResolvedPlan) -> dict[str, int]:
    """Bytes of the segments that hold no neurons: no more than they need."""
    segments, needs = resolved.plan.memory.segments, dict(resolved.needs.items())
    sizes = {"runtime": segments.runtime}
    for name in ("attention", "kv", "predictor", "workspace"):
        sizes[name] = min(getattr(segments, name), _round_up(needs[name].bytes))
    return sizes


def _save_memory(resolved: ResolvedPlan) -> tuple[ResolvedPlan, list[tuple[str, object, str]]]:
    """The plan with what else makes room for neurons: keys, values and reasons."""
    plan = resolved.plan
    found: list[tuple[str, object, str]] = []
    if "embedding" not in plan.memory.model_fields_set:
        memory = plan.memory.model_copy(update={"embedding": "flash"})
        smaller = replace(resolved, plan=plan.model_copy(update={"memory": memory}))
        saved = resolved.needs.attention.bytes - smaller.needs.attention.bytes
        if reads_embedding(smaller.plan, resolved.model) and (
            saved >= _WORTHWHILE_NEURONS * resolved.bundle.stride
        ):
            resolved, plan = smaller, smaller.plan
            reason = f"rows are read when their tokens come: {approximate_bytes(saved)} for neurons"
            found.append(("memory.embedding", "flash", f"resident -> flash, {reason}"))
    if plan.decode.predictor != "none" and "lend" not in plan.kv.model_fields_set:
        kv = plan.kv.model_copy(update={"lend": True})
        resolved = replace(resolved, plan=plan.model_copy(update={"kv": kv}))
        lent = approximate_bytes(describe_context(resolved).count_unused(0))
        reason = f"neurons lie in what the context does not use yet, {lent} at first"
        found.append(("kv.lend", True, f"false -> true, {reason}"))
    return resolved, found


def _choose_hot(
    resolved: ResolvedPlan, room: int, needs: Mapping[str, int]
) -> tuple[Fraction, int]:
    """Part of the plan's hot neurons that stays, and their bytes."""
    wanted = needs["hot"]
    if wanted + needs["cold"] <= room or wanted == 0:
        return Fraction(1), wanted
    dense = resolved.plan.decode.predictor == "none"
    best = min(room if dense else room * _HOT_PART, room - needs["cold"])
    scale = Fraction(int(best), wanted)
    # As the plan will be resolved: shares are rounded to whole neurons.
    stride, neurons = resolved.bundle.stride, resolved.model.layer_neurons
    counts = [round(_round_down(layer.hot * scale) * neurons) for layer in resolved.layers]
    # What dense units need besides their neurons stays as it is.
    others = max(0, wanted - stride * sum(layer.hot_neurons for layer in resolved.layers))
    return scale, sum(counts) * stride + others


def _scale_splits(resolved: ResolvedPlan, scale: Fraction) -> dict[str, object]:
    """Splits whose dense units have that part of their shares, by key: what they own is hot."""
    found: dict[str, object] = {}
    for placed in list_placed_splits(resolved.plan):
        dense = {
            name: _round_down(share * scale)
            for name, share in placed.split.items()
            if name != resolved.sparse_unit
        }
        if any(dense.values()):
            rest = round(1.0 - sum(dense.values()), 6)
            key = ".".join(map(str, placed.path))
            found[key] = {**dense, resolved.sparse_unit: rest}
    return found


def _list_shares(resolved: ResolvedPlan) -> dict[str, float]:
    """Every key that states hot neurons, and its value."""
    layers = resolved.plan.layers
    shares = {"layers.hot": layers.hot}
    for number, override in enumerate(layers.overrides):
        if override.hot is not None:
            shares[f"layers.overrides.{number}.hot"] = override.hot
    return shares


def _round_up(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _round_down(share: Fraction | float) -> float:
    return int(share * 10_000) / 10_000


def _describe(name: str, before: int, after: int) -> str:
    return f"{name}: {approximate_bytes(before)} -> {approximate_bytes(after)}"


def _explain_shortage(budget_bytes: int, sizes: Mapping[str, int]) -> UserError:
    parts = ", ".join(f"{name} {approximate_bytes(size)}" for name, size in sizes.items())
    return UserError.of(
        "P611",
        f"{approximate_bytes(budget_bytes)} is not enough for this plan: it needs at least "
        f"{approximate_bytes(sum(sizes.values()))} ({parts})",
        help="give it more memory, a shorter kv.context, or a smaller prefill.chunk",
    )
