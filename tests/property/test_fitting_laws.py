"""Laws of fitting: what is fitted to a budget validates, keeps to it, and grows with it."""

import json
from pathlib import Path
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from pi2.authoring.writing import write_document
from pi2.fitting.budget import SHARE_STEPS, Shortage, fit_plan, write_memory
from pi2.fitting.check import check_plan
from pi2.fitting.sources import find_source
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.plan import Plan, Segments
from tests.helpers.shipped_plans import read_device, read_model

MIB, GIB = 1 << 20, 1 << 30
UNITS = {"host": None, "oneplus-12": "npu", "pc-rtx-4090": "gpu"}
MODELS = ("pi2-demo", "bamboo-7b", "turbosparse-mixtral-47b")
STRIDES = {"pi2-demo": "4 KiB", "bamboo-7b": "8 KiB", "turbosparse-mixtral-47b": "8 KiB"}
shares = st.integers(0, SHARE_STEPS).map(lambda count: count / SHARE_STEPS)
odd_shares = st.floats(0.0, 1.0).map(lambda share: round(share, 5))


@st.composite
def layers(draw: st.DrawFn, unit: str | None, batch: int) -> dict[str, Any]:
    """Shares of a table of layers; a dense unit owns some of what is hot."""
    hot = draw(shares | odd_shares)

    def split() -> dict[str, float]:
        if unit is None or draw(st.booleans()):
            return {"cpu": 1.0}
        dense = draw(st.sampled_from([hot, hot / 2, 0.0]).map(lambda share: int(share * 1e5) / 1e5))
        return {unit: dense, "cpu": round(1.0 - dense, 6)}

    found: dict[str, Any] = {"split": split(), "hot": hot}
    if batch > 1 and unit is not None:
        found["batches"] = [{"sequences": 2, "split": split()}]
    return found


@st.composite
def wishes(draw: st.DrawFn) -> ResolvedPlan:
    """Plans that state shares and no sizes: with and without units of both kinds of memory."""
    model = read_model(draw(st.sampled_from(MODELS)))
    device = read_device(draw(st.sampled_from(sorted(UNITS))))
    unit, batch = UNITS[device.id], draw(st.sampled_from([1, 2]))
    table = draw(layers(unit, batch))
    if draw(st.booleans()):
        table["overrides"] = [{"select": "0-1", **draw(layers(unit, batch))}]
    memory: dict[str, Any] = {
        "budget": "0 B",
        "segments": dict.fromkeys(Segments.model_fields, "0 B"),
    }
    if unit is not None and draw(st.booleans()):
        memory["units"] = {unit: {"budget": f"{draw(st.integers(0, 4096))} MiB"}}
        if unit == "npu":
            memory["units"]["npu"]["shares_main_memory"] = True
    backend = draw(st.sampled_from(["null", "reference"]))
    predictor = draw(st.sampled_from(["gate", "low-rank", "none"]))
    values: dict[str, Any] = {
        "schema_version": 3, "device": device.id, "model": model.id, "weights": "store",
        "backends": {"cpu": backend} | ({} if unit is None else {unit: backend}), "memory": memory,
        "bundle": {"stride": STRIDES[model.id]}, "layers": table,
        "decode": {"predictor": predictor, "batch": batch}, "kv": {"context": 256},
    }  # fmt: skip
    if unit is not None and draw(st.booleans()):
        values["projections"] = {"attention": {unit: 0.25, "cpu": 0.75}}
    plan = Plan.model_validate_json(json.dumps(values))
    return ResolvedPlan(plan=plan, device=device, model=model, find_source=find_source)


budgets = st.integers(100 * MIB, 40 * GIB) | st.integers(150 * MIB, 8 * GIB)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ResolvedPlan, int]:
    """A wish, and any budget, or one that is hardly enough for the least of it."""
    wish = draw(wishes())
    if draw(st.booleans()):
        return wish, draw(budgets)
    try:
        fit_plan(wish, 1)
    except Shortage as shortage:
        return wish, shortage.needed_bytes + draw(st.sampled_from([0, 1, 4, 64, 512])) * MIB
    raise AssertionError("no plan fits into a byte")


def count_main_bytes(fitted: ResolvedPlan) -> int:
    memory = fitted.plan.memory
    total = sum(size for _, size in memory.segments)
    return total + sum(
        unit.budget for name, unit in memory.units.items() if fitted.shares_main_memory(name)
    )


def count_neuron_bytes(fitted: ResolvedPlan) -> int:
    segments = fitted.plan.memory.segments
    fixed = (segments.runtime, segments.attention, segments.kv)
    return count_main_bytes(fitted) - sum(fixed) - segments.predictor - segments.workspace


def fit(resolved: ResolvedPlan, budget: int | None) -> ResolvedPlan | None:
    try:
        return fit_plan(resolved, budget)
    except Shortage:
        return None


def check_valid(fitted: ResolvedPlan) -> None:
    report = check_plan(Path("x.plan.toml"), text=write_document(fitted.plan))
    errors = [item for item in report.diagnostics if item.severity == "error"]
    # Devices of these budgets need not exist: P203 is about the device's memory.
    assert [item for item in errors if item.code != "P203"] == []


@given(case=cases(), whole=st.booleans())
def test_what_is_fitted_validates_and_keeps_to_the_budget(
    case: tuple[ResolvedPlan, int], whole: bool
) -> None:
    wish, budget = case[0], None if whole else case[1]
    fitted = fit(wish, budget)
    assume(fitted is not None)
    assert fitted is not None
    memory = fitted.plan.memory
    assert budget is None or memory.budget == budget
    assert count_main_bytes(fitted) <= memory.budget
    check_valid(fitted)
    again = Plan.model_validate_json(
        json.dumps(
            {**json.loads(fitted.plan.model_dump_json()), "memory": write_memory(fitted.plan)}
        )
    )
    assert again.memory.segments == memory.segments and again.memory.units == memory.units


@given(case=cases(), other=budgets | st.integers(0, 2 * MIB))
def test_more_budget_never_makes_less_hot(case: tuple[ResolvedPlan, int], other: int) -> None:
    wish, one = case
    low, high = sorted((one, one + other if other <= 2 * MIB else other))
    smaller, larger = fit(wish, low), fit(wish, high)
    assert smaller is None or larger is not None, "what fits little memory fits more"
    if smaller is None or larger is None:
        return
    assert count_neuron_bytes(smaller) <= count_neuron_bytes(larger)
    for before, after in zip(smaller.layers, larger.layers, strict=True):
        assert before.hot_neurons <= after.hot_neurons
        kept = [0 if item.dense is None else item.dense.kept for item in (before, after)]
        assert kept[0] <= kept[1]


@given(wish=wishes(), budget=budgets)
def test_what_fits_is_as_it_was_stated(wish: ResolvedPlan, budget: int) -> None:
    """Nothing that is stated grows, and with memory for all of it nothing becomes less."""
    whole, fitted = fit(wish, None), fit(wish, budget)
    assume(whole is not None and fitted is not None)
    assert whole is not None and fitted is not None
    for stated, all_of_it, some in zip(wish.layers, whole.layers, fitted.layers, strict=True):
        assert all_of_it.hot == stated.hot >= some.hot
    if budget >= whole.plan.memory.budget:
        assert fitted.plan.layers == whole.plan.layers


@given(wish=wishes(), budget=budgets)
def test_a_shortage_names_a_budget_that_is_enough(wish: ResolvedPlan, budget: int) -> None:
    try:
        fit_plan(wish, budget)
    except Shortage as shortage:
        found = shortage
    else:
        return
    if "runtime" not in found.sizes:  # a unit's own memory is too small, whatever the budget
        assert set(found.sizes) == {"units.gpu"}
        assert found.needed_bytes > wish.plan.memory.units["gpu"].budget
        return
    assert budget < found.needed_bytes
    assert fit(wish, found.needed_bytes) is not None


@given(wish=wishes(), budget=budgets)
def test_what_has_been_fitted_fits(wish: ResolvedPlan, budget: int) -> None:
    """Fitting to the same budget again changes nothing that is hot."""
    fitted = fit(wish, budget)
    assume(fitted is not None)
    assert fitted is not None and fit_plan(fitted, budget).plan.layers == fitted.plan.layers
