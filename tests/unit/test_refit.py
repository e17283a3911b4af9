"""Another budget for a plan: what becomes smaller first, and when it is too small."""

from pathlib import Path
from typing import Any

import pytest

from pi2.diagnostics import UserError
from pi2.fitting.budget import count_runtime
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import parse_size
from pi2.plan.reading.references import find_shipped_folder
from pi2.refit import refit_plan
from tests.helpers.slow import mark_slow

TWO_UNITS = find_shipped_folder() / "demo-two-units.plan.toml"
DEMO = find_shipped_folder() / "demo.plan.toml"
BAMBOO = find_shipped_folder().parent / "tools/paper/plans/oneplus-12/bamboo-7b-half.plan.toml"
MIB = 1 << 20


def fit(budget: float, plan: Path = DEMO, **overrides: object) -> tuple[str, ResolvedPlan]:
    """What changes, in words, and the fitted plan."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    values, changes = refit_plan(load_plan(plan, overrides=given), int(budget * MIB))
    # Loading checks every rule: segments hold their needs and fit the budget.
    return "\n".join(changes), load_plan(plan, overrides={**given, **values})


def find_least() -> float:
    resolved = load_plan(DEMO)
    needs = {name: need.bytes for name, need in resolved.needs.items()}
    runtime = count_runtime(resolved.model, 100 * MIB)
    return (runtime + sum(needs.values()) - needs["hot"]) / MIB


SEVERAL: dict[str, object] = {
    "layers__hot": 0.5, "layers__batches": [{"sequences": 2, "split": {"second": 0.1, "cpu": 0.9}}],
    "decode__batch": 2, "memory__segments__kv": "8 MiB", "memory__segments__workspace": "5.125 MiB",
}  # fmt: skip


OWNED: list[dict[str, Any]] = [
    {},
    {"memory__units__second__budget": "3 MiB", "memory__segments__hot": "1 MiB"},
    {"pipeline__prefill": "layers-first"},
]


@pytest.mark.parametrize(
    "settings",
    [*map(mark_slow, OWNED), SEVERAL],
    ids=["part of hot", "a budget of its own", "several chunks", "several sequences"],
)
def test_what_a_unit_owns_becomes_less_with_the_hot_neurons(settings: dict[str, Any]) -> None:
    """Every budget is too small, or gives a plan that is sound."""
    fitted, refused = {}, {}
    for size in range(120 * 4, 136 * 4):
        try:
            told, plan = fit(size / 4, TWO_UNITS, **settings)
        except UserError as error:
            refused[size] = [found.code for found in error.diagnostics]
            continue
        fitted[size] = plan
        (dense,) = {layer.dense for layer in plan.layers}
        if dense is None:
            continue
        if plan.layers[0].hot_neurons < 307:
            assert "layers.split: cpu 0.7, second 0.3 -> " in told
    assert all(codes == ["P611"] for codes in refused.values())
    assert max(refused) < min(fitted)
    counts = [0 if p.layers[0].dense is None else p.layers[0].dense.kept for p in fitted.values()]
    assert counts == sorted(counts) and counts[-1] == 307


def test_every_change_is_told() -> None:
    told, fitted = fit(find_least() + 0.3)
    changes = told.splitlines()
    assert {"budget", "hot", "cold", "layers.hot"} <= {text.split(":")[0] for text in changes}
    assert f"layers.hot: 0.125 -> {fitted.plan.layers.hot:g}" in changes


def test_what_does_not_fit_takes_the_room_of_the_embedding_and_of_the_unused_context() -> None:
    before = load_plan(BAMBOO)
    values, changes = refit_plan(before, 3 << 30)
    fitted = load_plan(BAMBOO, overrides=values).plan
    assert (fitted.memory.embedding, fitted.kv.lend) == ("flash", True)
    told = "\n".join(changes)
    assert "memory.embedding: resident -> flash" in told and "kv.lend: false -> true" in told
    stated: dict[str, object] = {"memory.embedding": "resident", "kv.lend": False}
    kept, _ = refit_plan(load_plan(BAMBOO, overrides=stated), 3 << 30)
    assert not set(stated) & set(kept), "what the author states stays"
    assert not set(stated) & set(refit_plan(before, 8 << 30)[0]), "everything fits"


def test_too_little_names_what_it_takes() -> None:
    with pytest.raises(UserError) as caught:
        fit(find_least() - 0.1)
    finding = caught.value.diagnostics[0]
    assert finding.code == "P611" and "runtime: 87 MiB" in finding.notes


def test_a_plan_that_states_less_for_the_runtime_keeps_it() -> None:
    _, fitted = fit(find_least(), memory__segments__runtime="80 MiB")
    assert fitted.plan.memory.segments.runtime == 80 * MIB


@pytest.mark.parametrize("text", ["64", "a lot", "64 Mib", "0 B"])
def test_a_budget_needs_a_unit_and_a_size(text: str) -> None:
    with pytest.raises(UserError, match="P612"):
        parse_size(text)


def test_a_budget_may_have_no_space() -> None:
    assert parse_size("3GiB") == 3 << 30
