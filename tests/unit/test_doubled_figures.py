"""A device file with one figure doubled moves planner and simulator in the right direction."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from pi2.costs.cost import cost_resolved
from pi2.costs.rates import read_rates
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.simulate import read_inputs, simulate

HALF = Path(__file__).parents[2] / "plans/oneplus-12/bamboo-7b-half.plan.toml"
FASTER = {"bandwidth.value", "rate", "giga_ops"}
"""Twice as much is never slower, and at most twice as fast."""
SLOWER = {"latency"}
SLOWER |= {"cores"}  # of the same arithmetic, twice the cores have half, and take longer to meet
NEUTRAL = {"power.value", "frequency", "queue_depth", "queues", "capacity", "usable"}
NEUTRAL |= {"own_memory"}
NOISE = 2e-3
MATTERS = {
    "units.cpu.read_bandwidth.value",
    "units.npu.read_bandwidth.value",
    "memory.read_bandwidth.value",
    "storage.reads.3.rate",  # random reads within a layer, by the cores that issue them
}


@lru_cache
def load_phone() -> ResolvedPlan:
    return load_plan(HALF)


def list_figures() -> list[str]:
    """Every number of the device file with a unit, and every plain one."""
    return [".".join(map(str, path)) for path in _walk(read_values(), ())]


def read_values() -> Any:
    return load_phone().device.model_dump(mode="json", exclude_none=True)


def _walk(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Paths of figures; what identifies a figure, such as its block, is none."""
    names = {"block", "range", "samples", "spread", "schema_version", "block_size", "depth"}
    names |= {"peak", "overlap", "core_share", "sustained"}  # nothing to double: all are 1
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in names:
                yield from _walk(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _walk(item, (*path, number))
    elif isinstance(value, int | float) or value[:1].isdigit():
        if path[-1] != "source":
            yield path


def change(figure: str, factor: float) -> Device:
    values = copy.deepcopy(read_values())
    place, (*path, key) = values, [int(x) if x.isdigit() else x for x in figure.split(".")]
    for part in path:
        place = place[part]
    old = place[key]
    if isinstance(old, str):
        number, _, unit = old.partition(" ")
        place[key] = f"{float(number) * factor:.6f} {unit}"
    else:
        place[key] = type(old)(old * factor)
    return Device.model_validate_json(json.dumps(values))


def predict(device: Device) -> dict[str, float]:
    resolved = replace(load_phone(), device=device)
    cost = cost_resolved(resolved, read_rates(device))
    found = simulate(read_inputs(resolved), prompt_tokens=64, tokens=24)
    assert found.prefill is not None and cost.prefill_tokens_s is not None
    assert cost.token_j is not None and found.energy is not None
    return {
        "planned": cost.tokens_s,
        "planned prompt": cost.prefill_tokens_s,
        "simulated": found.tokens_s,
        "simulated prompt": found.prefill.tokens_s,
    }


@lru_cache
def predict_phone() -> dict[str, float]:
    return predict(load_phone().device)


@pytest.mark.parametrize("figure", list_figures())
def test_a_doubled_figure_moves_predictions_in_the_right_direction(figure: str) -> None:
    before, after = predict_phone(), predict(change(figure, 2.0))
    changes = {name: after[name] / before[name] - 1.0 for name in before}
    if any(figure.endswith(key) for key in FASTER):
        assert all(-NOISE <= item <= 1.0 + NOISE for item in changes.values()), changes
    elif any(figure.endswith(key) for key in SLOWER):
        assert all(-0.5 - NOISE <= item <= NOISE for item in changes.values()), changes
    else:
        known = any(figure.endswith(key) for key in NEUTRAL) or "penalty" in figure
        assert known, f"say in which direction {figure} moves predictions"
        assert all(abs(item) <= NOISE for item in changes.values()), changes
    if figure in MATTERS:
        assert min(changes["planned"], changes["simulated"]) > 0.03, changes


def test_power_moves_energy_and_nothing_else() -> None:
    def find_energy(device: Device) -> tuple[float, float]:
        resolved = replace(load_phone(), device=device)
        cost = cost_resolved(resolved, read_rates(device))
        found = simulate(read_inputs(resolved), tokens=24)
        assert cost.token_j is not None and found.energy is not None
        return cost.token_j, found.energy.token_j

    before = find_energy(load_phone().device)
    for figure in ("units.cpu.power.value", "power.value"):
        for old, new in zip(before, find_energy(change(figure, 2.0)), strict=True):
            assert 1.1 * old < new <= 2.0 * old
