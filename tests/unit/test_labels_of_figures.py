"""Predictions depend on values: neither on their labels, nor on whether an assumption is stated."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from pi2.costs.cost import cost_resolved
from pi2.costs.rates import read_rates
from pi2.fitting.budget import fit_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.common import Provenance
from pi2.plan.documents.device import Device
from tests.helpers.shipped_plans import read_device
from tools.compare_predictions import Cell, make_plan

FOLDER = Path(__file__).parents[2] / "plans/devices"
STATED = ("oneplus-12", "oneplus-ace-2", "cloud-vm-zen5", "raspberry-pi-5", "apple-m1-max")
ORIGIN = {"status": "measured", "source": "a test"}


def make(device: str, model: str = "qwen3-30b-a3b", memory: float = 0.5) -> ResolvedPlan:
    """A plan of experts of which ``memory`` is a cache."""
    cell = Cell(
        device=device, model=model, predictor="router", memory=1.0, cache=0.1, threads=None,
        batch=1, look_ahead="none", policy="lfu", dense=0.0, prompt=128,
    )  # fmt: skip
    whole = make_plan(cell)
    return fit_plan(whole, int(whole.plan.memory.budget * memory))


def predict(plan: ResolvedPlan, device: Device) -> tuple[float, float | None]:
    cost = cost_resolved(replace(plan, device=device))
    return cost.tokens_s, cost.prefill_tokens_s


def read_values(device: Device) -> Any:
    return json.loads(device.model_dump_json(exclude_none=True))


def label(values: Any, status: str) -> Any:
    """``values`` with one status for all figures."""
    if isinstance(values, list):
        return [label(item, status) for item in values]
    if not isinstance(values, dict):
        return values
    return {key: status if key == "status" else label(item, status) for key, item in values.items()}


@pytest.mark.parametrize("name", STATED)
def test_a_label_changes_no_prediction(name: str) -> None:
    device, plan = read_device(name), make(name)
    found = {
        status: predict(
            plan, Device.model_validate_json(json.dumps(label(read_values(device), status)))
        )
        for status in get_args(Provenance)
    }
    assert set(found.values()) == {predict(plan, device)}


@pytest.mark.parametrize("name", STATED)
def test_stating_what_is_assumed_changes_no_prediction(name: str) -> None:
    device, plan = read_device(name), make(name)
    values, rates = read_values(device), read_rates(device)
    cpu = next(key for key, unit in device.units.items() if unit.kind == "cpu")
    rate = {"value": f"{rates.bandwidth_bytes_s:.0f} B/s", **ORIGIN}
    values["units"][cpu].setdefault("read_bandwidth", rate)
    sustained = 1.0 if rates.measured else rates.constants.sustained_reads
    shares = {"overlap": rates.overlap, "core_share": rates.core_share, "sustained": sustained}
    for key, share in shares.items():
        values["storage"].setdefault(key, {"value": share, **ORIGIN})
    stated = Device.model_validate_json(json.dumps(values))
    (before, _), (after, _) = predict(plan, device), predict(plan, stated)
    assert after == pytest.approx(before, rel=1e-6)


def test_a_data_sheets_arithmetic_is_a_part_of_itself() -> None:
    device = read_device("oneplus-12")
    values = read_values(device)
    values["units"]["npu"]["compute"][0]["peak"] = True
    sheet = Device.model_validate_json(json.dumps(values))
    whole, part = (read_rates(item).dense for item in (device, sheet))
    assert whole is not None and part is not None and whole.ops_s is not None
    assert part.ops_s == pytest.approx(0.5 * whole.ops_s)


@pytest.mark.parametrize("name", ["raspberry-pi-5", "apple-m1-max"])
def test_speed_grows_with_memory_and_has_no_cliff(name: str) -> None:
    """A processor slows down with the time spent reading, not with the first read."""
    memories = [0.3 + 0.01 * step for step in range(71)]
    speeds = [predict(make(name, memory=share), read_device(name))[0] for share in memories]
    for before, after in itertools.pairwise(speeds):
        assert before * 0.999 <= after <= before * 1.1
    assert speeds[-1] > 1.5 * speeds[0]
