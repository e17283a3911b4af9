"""Predictions depend on values: neither on their labels, nor on whether an assumption is stated."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from pi2.authoring.writing import write_document
from pi2.costs.constants import Range
from pi2.costs.cost import cost_plan, cost_resolved
from pi2.costs.rates import read_rates
from pi2.fitting.budget import fit_plan
from pi2.fitting.check import check_file
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.common import Provenance
from pi2.plan.documents.device import Device
from pi2.planning.planner import plan
from pi2.planning.wish import Wish
from tests.helpers.shipped_plans import read_device
from tests.helpers.slow import keep_quick
from tools.compare_predictions import Cell, make_plan, read_model

FOLDER = Path(__file__).parents[2] / "plans/devices"
STATED = [
    path.name.removesuffix(".device.toml")
    for path in sorted(FOLDER.glob("*.device.toml"))
    if "[[storage.reads]]" in path.read_text("utf-8")
]
"""Shipped devices that say how fast they are."""
PHONE = Path(__file__).parents[1] / "plans/sheets/phone.device.toml"
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


def find_range(plan: ResolvedPlan, device: Device) -> Range:
    return cost_plan(replace(plan, device=device)).range_tokens_s


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
    own = {
        status: Device.model_validate_json(json.dumps(label(read_values(device), status)))
        for status in get_args(Provenance)
    }
    assert {predict(plan, item) for item in own.values()} == {predict(plan, device)}
    ranges = {status: find_range(plan, item) for status, item in own.items()}
    for found in ranges.values():
        assert found.low <= found.expected <= found.high <= 2.3 * found.low
    wide, narrow = ranges["vendor-claimed"], ranges["measured"]
    assert wide.low <= narrow.low and narrow.high <= wide.high


@pytest.mark.parametrize("name", STATED)
def test_stating_what_is_assumed_changes_no_prediction(name: str) -> None:
    device, plan = read_device(name), make(name)
    values, rates = read_values(device), read_rates(device)
    cpu = next(key for key, unit in device.units.items() if unit.kind == "cpu")
    if rates.dense is None and device.memory.read_bandwidth is None:
        rate = {"value": f"{rates.bandwidth_bytes_s:.3f} B/s", **ORIGIN}
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


@pytest.mark.parametrize("name", keep_quick(STATED, STATED[::4]))
def test_speed_grows_with_memory_and_has_no_cliff(name: str) -> None:
    """A processor slows down with the time spent reading, not with the first read."""
    memories = [0.3 + 0.01 * step for step in range(71)]
    speeds = [predict(make(name, memory=share), read_device(name))[0] for share in memories]
    for before, after in itertools.pairwise(speeds):
        assert before * 0.999 <= after <= before * 1.12
    assert speeds[-1] > 1.2 * speeds[0]


def test_a_phone_is_written_from_its_data_sheet_and_planned_for() -> None:
    """In at most 30 lines, without a finding, and every conversion can be looked up."""
    path = PHONE
    assert len(path.read_text("utf-8").splitlines()) <= 30
    report = check_file(path)
    assert report.diagnostics == () and isinstance(report.document, Device)
    device = report.document
    assert device.memory.peak_bandwidth is not None and device.units["npu"].compute
    assert device.memory.peak_bandwidth.value == 4800e6 * 64 / 8
    assert device.units["npu"].compute[0].giga_ops == 45000
    assert device.storage.reads[1].rate == 250_000 * 4096
    text = write_document(device, report.files["device"])
    for formula in ("4800 MT/s x 64 bit / 8", "45 TOPS x 1000", "250000 IOPS x block"):
        assert f"# {formula}" in text
    wish = Wish(device=device, model=read_model("qwen3-30b-a3b"), memory_bytes=8 << 30)
    found = plan(wish).cost.range_tokens_s
    assert 1.0 < found.low < found.expected < found.high


def test_a_mac_is_planned_with_its_gpu_and_without_io_uring() -> None:
    """Its GPU reads what the memory's peak lets GPUs read."""
    path = PHONE.with_name("mac.device.toml")
    device = check_file(path).document
    assert isinstance(device, Device)
    model = read_model("mistral-7b")
    whole, half = (
        plan(Wish(device=device, model=model, memory_bytes=size << 30)) for size in (8, 3)
    )
    layers = whole.resolved.layers
    assert all(layer.split.get("gpu", 0.0) > 0.3 for layer in layers)
    assert whole.cost.tokens_s > 20.0, "without the GPU, 16.7"
    assert half.resolved.plan.io.engine == "pread" and half.cost.hit_rate < 1.0
