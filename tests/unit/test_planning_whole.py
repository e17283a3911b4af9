"""The planner gives a card the whole model where it has room for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pi2.diagnostics import UserError
from pi2.fitting.check import check_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.planning.planner import PlannedPlan, plan
from pi2.planning.text import write_planned
from pi2.planning.wish import Wish, read_document

GIB = 1 << 30


def wish_for(device: str, model: str, **changes: object) -> Wish:
    """A wish for shipped documents, with 8 GiB of main memory."""
    unit = read_document(device, "device").document
    weights = read_document(model, "model").document
    assert isinstance(unit, Device) and isinstance(weights, Model)
    found = Wish(device=unit, model=weights, memory_bytes=8 * GIB)
    return replace(found, **changes)  # type: ignore[arg-type]


def is_whole(planned: PlannedPlan) -> bool:
    """Whether the GPU has the whole model."""
    return planned.resolved.has_whole_unit


def test_a_card_with_room_has_the_whole_model() -> None:
    planned = plan(wish_for("pc-rtx-4090", "bamboo-7b"))
    assert is_whole(planned)
    assert planned.values["layers"]["split"] == {"gpu": 1.0}
    # The reason is the other plan's speed.
    (decision,) = planned.decisions
    speeds = dict(decision.tokens_s)
    assert speeds["gpu alone"] == planned.cost.tokens_s
    assert speeds["the CPU and what is beside it"] < planned.cost.tokens_s


def test_a_card_without_room_computes_beside_the_cpu_or_not_at_all() -> None:
    planned = plan(wish_for("pc-rtx-4090", "bamboo-7b", unit_memory={"gpu": 3 * GIB}))
    assert not is_whole(planned)
    assert "cpu" in planned.values["layers"]["split"]


def test_the_plan_has_no_findings(tmp_path: Path) -> None:
    planned = plan(wish_for("server-h200", "llama-2-7b"))
    path = tmp_path / "whole.plan.toml"
    path.write_text(
        write_planned(planned, device="server-h200", model="llama-2-7b", store="s", name="Whole")
    )
    assert not check_plan(path).diagnostics


def test_figures_of_the_processor_are_not_missed() -> None:
    """Nothing is stated of the processor and of the flash beside an H200."""
    assert is_whole(plan(wish_for("server-h200", "llama-2-7b")))
    with pytest.raises(UserError) as error:
        plan(wish_for("server-h200", "llama-2-7b", unit_memory={"gpu": GIB}))
    assert [item.code for item in error.value.diagnostics] == ["P351"]


def test_units_in_main_memory_are_not_given_the_whole_model() -> None:
    assert not is_whole(plan(wish_for("oneplus-12", "bamboo-7b")))
