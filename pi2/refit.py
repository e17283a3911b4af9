"""Another memory budget for a plan: which segments become smaller or larger, and by how much.

Where not all neurons fit, the embedding and the unused part of the context make room for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pi2.diagnostics import UserError
from pi2.memory.context import describe_context
from pi2.plan.arithmetic.fitting import Shortage, find_room, fit_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.runtime import count_runtime
from pi2.plan.arithmetic.sizes import count_ffn_bytes, reads_embedding
from pi2.plan.checking.splits import list_placed_splits
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    QuantityError,
    approximate_bytes,
    format_bytes,
    parse_quantity,
)

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
    it does not use yet, unless the plan states ``memory.embedding`` or ``kv.lend`` itself; the rest
    is `pi2.plan.arithmetic.fitting`'s.  Raises UserError P611 if even the least does not fit.
    """
    memory, overrides = resolved.plan.memory, dict[str, object]()
    changes = [_describe("budget", memory.budget, budget_bytes)]
    runtime_bytes = memory.segments.runtime
    if not resolved.list_unit_kinds():  # of what drivers take, the plan knows more
        runtime_bytes = min(runtime_bytes, count_runtime(resolved.model, budget_bytes))
    if find_room(resolved, budget_bytes, runtime_bytes) < count_ffn_bytes(resolved):
        resolved, savings = _save_memory(resolved)
        overrides |= {key: value for key, value, _ in savings}
        changes += [f"{key}: {reason}" for key, _, reason in savings]
    try:
        fitted = fit_plan(resolved, budget_bytes, runtime_bytes=runtime_bytes)
    except Shortage as shortage:
        raise _explain_shortage(budget_bytes, shortage) from None
    overrides["memory.budget"] = format_bytes(budget_bytes)
    sizes, shares = _list_sizes(fitted.plan), _list_shares(fitted.plan)
    for key, before in _list_sizes(resolved.plan).items():
        if sizes[key] != before:
            overrides[key] = format_bytes(sizes[key])
            changes.append(_describe(key.removeprefix("memory.segments."), before, sizes[key]))
    for key, share in _list_shares(resolved.plan).items():
        if shares[key] != share:
            overrides[key] = shares[key]
            changes.append(f"{key}: {_write_share(share)} -> {_write_share(shares[key])}")
    return Refit(overrides=overrides, changes=tuple(changes))


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


def _list_sizes(plan: Plan) -> dict[str, int]:
    """Every size of a segment or a unit's memory, by key."""
    sizes = {f"memory.segments.{name}": size for name, size in plan.memory.segments}
    return sizes | {
        f"memory.units.{name}.budget": unit.budget for name, unit in plan.memory.units.items()
    }


def _list_shares(plan: Plan) -> dict[str, float | Mapping[str, float]]:
    """Every share of hot neurons, and every split, by key."""
    layers = plan.layers
    shares: dict[str, float | Mapping[str, float]] = {"layers.hot": layers.hot}
    for number, override in enumerate(layers.overrides):
        if override.hot is not None:
            shares[f"layers.overrides.{number}.hot"] = override.hot
    splits = {".".join(map(str, item.path)): item.split for item in list_placed_splits(plan)}
    return shares | splits


def _write_share(share: float | Mapping[str, float]) -> str:
    if isinstance(share, Mapping):
        return ", ".join(f"{name} {part:g}" for name, part in share.items())
    return f"{share:g}"


def _describe(name: str, before: int, after: int) -> str:
    return f"{name}: {approximate_bytes(before)} -> {approximate_bytes(after)}"


def _explain_shortage(budget_bytes: int, shortage: Shortage) -> UserError:
    sizes = {name: size for name, size in shortage.sizes.items() if size}
    parts = ", ".join(f"{name} {approximate_bytes(size)}" for name, size in sizes.items())
    return UserError.of(
        "P611",
        f"{approximate_bytes(budget_bytes)} is not enough for this plan: it needs at least "
        f"{approximate_bytes(shortage.needed_bytes)} ({parts})",
        help="give it more memory, a shorter kv.context, or a smaller prefill.chunk",
    )
