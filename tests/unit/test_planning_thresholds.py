"""Thresholds for experts and limits of reads in predictions, and the planner's choice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pi2.authoring.writing import write_document
from pi2.cli.main import run as cli
from pi2.costs.cost import Cost, cost_resolved
from pi2.fitting.completion import resolve_values
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.model import Model
from pi2.plan.reading.thresholds import LayerThresholds, Thresholds
from pi2.planning.planner import WITHOUT, PlannedPlan, choose_thresholds, plan
from pi2.planning.text import write_planned
from pi2.planning.wish import Wish
from tests.helpers.shipped_plans import read_device, read_model

GIB = 1 << 30


@pytest.fixture(scope="module")
def planned() -> PlannedPlan:
    """An exact plan for a mixture with large neurons, two thirds of which have to be read."""
    model = read_model("mixtral-8x7b")
    device = read_device("cloud-vm-zen5")
    return plan(Wish(device=device, model=model, memory_bytes=12 * GIB, context=1024))


def make_thresholds(model: Model, kept: float) -> Thresholds:
    assert model.moe is not None
    layer = LayerThresholds(
        gate=0.1, experts=(0.1,) * model.expert_count, computed=kept, active=kept
    )
    return Thresholds(
        schema_version=3,
        name="some",
        model=model.id,
        activation=model.ffn.activation,
        hidden=model.shape.hidden,
        neurons=model.layer_neurons,
        method="cats",
        target=round(1.0 - kept, 6),
        tokens=1,
        text="",
        layers=(layer,) * model.shape.layers,
    )


def choose(planned: PlannedPlan, kept: float) -> PlannedPlan:
    thresholds = make_thresholds(planned.wish.model, kept)
    wish = replace(planned.wish, thresholds=thresholds, thresholds_file="some.thresholds.toml")
    return choose_thresholds(replace(planned, wish=wish))


def change(planned: PlannedPlan, **tables: Any) -> ResolvedPlan:
    return resolve_values({**planned.values, **tables}, planned.wish.device, planned.wish.model)


def test_the_planner_takes_thresholds_where_they_are_faster(planned: PlannedPlan) -> None:
    found = choose(planned, 0.1)
    decision = found.decisions[-1]
    assert decision.key == "sparsity" and decision.chosen != WITHOUT
    speeds = dict(decision.tokens_s)
    assert found.cost.tokens_s == max(speeds.values()) > speeds[WITHOUT]
    assert found.resolved.plan.memory.budget <= planned.resolved.plan.memory.budget
    text = write_planned(found, device="d", model="m", store="s", name="n")
    assert "some.thresholds.toml" in text and "[sparsity]" in text


def test_and_leaves_them_where_they_are_not(planned: PlannedPlan) -> None:
    # Nearly all neurons are read one by one instead of as whole experts, and their gates besides.
    found = choose(planned, 0.95)
    assert found.decisions[-1].chosen == WITHOUT and found.values == planned.values
    assert choose_thresholds(planned) is planned


def test_what_dials_do_not_read_costs_no_reads(planned: PlannedPlan) -> None:
    def cost(**experts: Any) -> Cost:
        return cost_resolved(change(planned, experts=experts))

    exact, best = cost(), cost(read_best=1)
    assert best.tokens_s > exact.tokens_s
    never = cost(most_reads=0)
    assert all(layer.read_s == 0.0 for layer in never.layers)
    assert exact.tokens_s < never.tokens_s


def test_thresholds_of_another_model_are_refused(
    planned: PlannedPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.thresholds.toml"
    file.write_text(write_document(make_thresholds(planned.wish.model, 0.5)))
    command = ["plan", "--device", "cloud-vm-zen5", "--model", "qwen3-30b-a3b", "--memory", "8GiB"]
    assert cli([*command, "--thresholds", str(file)]) == 2
    assert "P258" in capsys.readouterr().err
    assert cli([*command, "--thresholds", str(file), "--exact"]) == 2
    assert "--thresholds leaves neurons out" in capsys.readouterr().err
