"""A plan with overrides, or for another memory budget: what the plan derived is derived again.

If not all neurons fit, the embedding and the unused part of the context make room for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pi2 import pause_collection
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.budget import MIB, Shortage, count_runtime, explain_shortage, find_room, fit_plan
from pi2.fitting.check import Report, check_plan
from pi2.fitting.inspection import Reuse
from pi2.plan.arithmetic.resolved import ResolvedPlan, list_placed_splits
from pi2.plan.arithmetic.sizes import count_ffn_bytes, reads_embedding
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.quantities import approximate_bytes, compare_bytes, format_bytes, parse_size
from pi2.plan.reading.thresholds import GivenThresholds
from pi2.plan.toml.text import write_value
from pi2.plan.weights.layout import round_up
from pi2.sharing.references import LockedReferences
from pi2.weights.file_reading import FileFiller

_TRIES = 32
"""Budgets that are tried at most, a MiB apart, to find the least."""

SIZE_CODES = frozenset({"P201", "P202", "P263", "P264"})
"""Findings about sizes, which another fit of the plan mends."""
_WORTHWHILE_NEURONS = 256
"""Room for so many neurons saves more reads than the two that a row of the embedding takes: of the
neurons that a cache just holds, one in a hundred or more is used for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPlan:
    """A plan as a command or a program wants it."""

    report: Report
    overrides: Mapping[str, object]
    """Values to load the plan with, by key: the given ones, and the ones that follow from them."""
    changes: tuple[str, ...] = ()
    """The values that followed, in words, one line each."""

    @property
    def origin(self) -> tuple[Path, dict[str, object]]:
        """The plan's file, and values to load it with again."""
        return self.resolved.path, dict(self.overrides)

    @property
    def resolved(self) -> ResolvedPlan:
        """The plan; `UserError` with all findings if it has errors."""
        if self.report.resolved is None:
            raise self.report.make_error()
        return self.report.resolved


@pause_collection()
def read_plan(
    path: Path,
    *,
    name: str | None = None,
    overrides: Mapping[str, object] | None = None,
    memory_bytes: int | None = None,
    locked: bool = False,
    thresholds: GivenThresholds = None,
    files: FileFiller | None = None,
) -> FittedPlan:
    """Read the plan at ``path`` with ``overrides``, fitted to ``memory_bytes`` if that is given.

    An override replaces a contradicting value of the plan's files, and sizes that an override makes
    too small are fitted again; ``files`` are open GGUF files, and ``locked`` refuses references
    whose source here differs from the lock. Raises `UserError` P611 if even the least does not
    fit."""
    check = partial(
        check_plan,
        path,
        name=name,
        resolver=LockedReferences(path.parent, locked=locked),
        thresholds=thresholds,
        reuse=Reuse(keeps_all=True),
        fill=files or FileFiller(),
    )
    given = dict(overrides or {})
    report = check(overrides=given)
    if report.runs_file or report.derives:
        # Whatever the plan does not state is derived anew.
        before = report.candidate
        if memory_bytes is not None:
            given["memory.budget"] = format_bytes(memory_bytes)
            report = check(overrides=given)
        # What it states gives way where nothing else helps.
        if report.runs_file or report.is_sound or report.candidate is None:
            after, changes = report.resolved, []
            if before is not None and after is not None and not report.runs_file:
                changed = _compare(before.plan, after.plan)
                changes = [text for key, _, text in changed if key.startswith("memory.")]
            return FittedPlan(report=report, overrides=given, changes=tuple(changes))
    errors = _list_errors(report)
    changes = []
    unfit = FittedPlan(report=_leave_out_sizes(report), overrides=given)
    if memory_bytes is None and not (given and errors):
        return unfit
    if errors and any(
        memory_bytes is None or item.code not in SIZE_CODES
        for item in (_list_errors(check()) if given else errors)
    ):
        return unfit
    fitted: dict[str, object] = {}
    while odd := [item for item in errors if item.code not in SIZE_CODES]:
        found = _give_way(report, odd, {**given, **fitted})
        if not found:
            return unfit
        fitted |= dict.fromkeys(found)
        changes += [f"{key}: {write_value(old)} yields to --set" for key, old in found.items()]
        report = check(overrides={**given, **fitted})
        errors = _list_errors(report)
    if report.candidate is not None and (errors or memory_bytes is not None):
        try:
            budget = memory_bytes or report.candidate.plan.memory.budget
            follows, told = refit_plan(report.candidate, budget)
        except UserError as error:
            if memory_bytes is not None:
                raise
            raise UserError(error.diagnostics) from None  # a finding, as without a fit
        if memory_bytes is None and _contradicts(follows, given):
            return unfit
        fitted |= follows
        changes += told
        report = check(overrides={**given, **fitted})
    return FittedPlan(report=report, overrides={**given, **fitted}, changes=tuple(changes))


def _compare(before: Plan, after: Plan) -> Iterator[tuple[str, object, str]]:
    """Keys of sizes and shares that are others, values to write there, and both in words."""
    values = _list_values(after)
    for key, old in _list_values(before).items():
        new = values.get(key, old)
        if new == old:
            continue
        if isinstance(old, int) and isinstance(new, int):
            name = "budget" if key == "memory.budget" else key.removeprefix("memory.segments.")
            yield key, format_bytes(new), f"{name}: {' -> '.join(compare_bytes(old, new))}"
        else:
            yield key, new, f"{key}: {_write_share(old)} -> {_write_share(new)}"


def _list_values(plan: Plan) -> dict[str, int | float | Mapping[str, float]]:
    """Sizes in bytes, hot shares and splits of a plan, by key."""
    memory, layers = plan.memory, plan.layers
    found: dict[str, int | float | Mapping[str, float]] = {"memory.budget": memory.budget}
    found |= {f"memory.segments.{name}": size for name, size in memory.segments}
    found |= {f"memory.units.{name}.budget": unit.budget for name, unit in memory.units.items()}
    found["layers.hot"] = layers.hot
    for number, override in enumerate(layers.overrides):
        if override.hot is not None:
            found[f"layers.overrides.{number}.hot"] = override.hot
    splits = {".".join(map(str, item.path)): item.split for item in list_placed_splits(plan)}
    return found | splits


def _write_share(share: float | Mapping[str, float]) -> str:
    if isinstance(share, Mapping):
        return ", ".join(f"{name} {part:g}" for name, part in share.items())
    return f"{share:g}"


def _leave_out_sizes(report: Report) -> Report:
    others = [item for item in report.diagnostics if item.code not in SIZE_CODES]
    if all(item.severity != "error" for item in others):
        return report
    return replace(report, diagnostics=tuple(others))


def _list_errors(report: Report) -> list[Diagnostic]:
    return [item for item in report.diagnostics if item.severity == "error"]


def _give_way(
    report: Report, errors: list[Diagnostic], given: Mapping[str, object]
) -> dict[str, object]:
    """Keys of the plan's files that ``errors`` are about, with their values; none if one of them is
    about something else, or about ``given`` values."""
    found: dict[str, object] = {}
    for item in errors:
        key = item.path or ""
        value: object = report.files["plan"].values if "plan" in report.files else {}
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        # A budget that holds nothing says so itself.
        if item.code == "P026" or value is None or any(_overlap(key, other) for other in given):
            return {}
        found[key] = value
    return found


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _contradicts(fitted: Mapping[str, object], given: Mapping[str, object]) -> bool:
    for key in fitted.keys() & given.keys():
        value = given[key]
        if key.startswith("memory.") and isinstance(value, str):
            value = format_bytes(parse_size(value, key))
        if fitted[key] != value:
            return True
    return False


def refit_plan(
    resolved: ResolvedPlan, budget_bytes: int
) -> tuple[Mapping[str, object], Sequence[str]]:
    """Fit ``resolved`` into ``budget_bytes``: values to load the plan with, by key, and the changed
    ones in words, one line each.

    If some neurons do not fit, rows of the embedding come from flash and the context lends its
    unused part. A stated ``memory.embedding`` or ``kv.lend`` stays; `pi2.fitting.budget` does the
    rest. Raises UserError P611 if even the least does not fit."""
    before = resolved.plan
    changes: list[str] = []
    overrides: dict[str, object] = {"memory.budget": format_bytes(budget_bytes)}
    runtime_bytes = _find_runtime(resolved, budget_bytes)
    if find_room(resolved, budget_bytes, runtime_bytes) < count_ffn_bytes(resolved):
        resolved, savings = _save_memory(resolved)
        overrides |= {key: value for key, value, _ in savings}
        changes = [f"{key}: {reason}" for key, _, reason in savings]
    try:
        fitted = fit_plan(resolved, budget_bytes, stated={"runtime": runtime_bytes})
    except Shortage as shortage:
        if not all(name.startswith("units.") for name in shortage.sizes):
            shortage = Shortage(shortage.sizes, _find_least(resolved, shortage))
        raise explain_shortage("P611", shortage, budget_bytes) from None
    for key, value, text in _compare(before, fitted.plan):
        overrides[key] = value
        changes.append(text)
    derived: dict[str, object] = {
        "kv.context": before.kv.context,
        "prefill.chunk": before.prefill.chunk,
        "layers.hot": fitted.plan.layers.hot,
    }
    # Of all sizes: what was derived again would not know the others.
    for name, size in fitted.plan.memory.segments:
        derived[f"memory.segments.{name}"] = format_bytes(size)
    overrides |= {k: v for k, v in derived.items() if tuple(k.split(".")) in resolved.derived}
    return overrides, changes


def _find_runtime(resolved: ResolvedPlan, budget_bytes: int) -> int:
    stated = resolved.plan.memory.segments.runtime
    if resolved.list_unit_kinds():  # of what drivers take, the plan knows more
        return stated
    return min(stated, count_runtime(resolved.model, budget_bytes))


def _save_memory(resolved: ResolvedPlan) -> tuple[ResolvedPlan, list[tuple[str, object, str]]]:
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
        from pi2.memory.arena import describe_context  # numpy

        kv = plan.kv.model_copy(update={"lend": True})
        resolved = replace(resolved, plan=plan.model_copy(update={"kv": kv}))
        lent = approximate_bytes(describe_context(resolved).count_unused(0))
        reason = f"neurons use the free part of the context, {lent} at first"
        found.append(("kv.lend", True, f"false -> true, {reason}"))
    return resolved, found


def _find_least(resolved: ResolvedPlan, shortage: Shortage) -> int:
    """The least budget, in whole MiB, that the plan fits into."""
    budget = shortage.needed_bytes
    for _ in range(_TRIES):
        budget = round_up(budget, MIB)
        try:
            fit_plan(resolved, budget, stated={"runtime": _find_runtime(resolved, budget)})
        except Shortage as further:
            budget = max(budget + 1, further.needed_bytes)
        else:
            break
    return budget
