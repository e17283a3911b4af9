"""A device file with one figure doubled moves planner and simulator in the right direction: a phone
whose figures were published, and two cores of a Skylake server that `pi2 probe` measured."""

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
from tests.helpers.shipped_plans import read_model, read_probed, resolve_probed
from tests.helpers.slow import keep_quick

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
Place = tuple[str | int, ...]
NAMES = {"block", "range", "samples", "spread", "schema_version", "block_size", "depth"}
"""Keys that identify a figure."""
NAMES |= {"peak", "overlap", "core_share", "sustained"}  # nothing to double: all are 1


@lru_cache
def load_phone() -> ResolvedPlan:
    return load_plan(HALF)


def read_phone() -> Any:
    return load_phone().device.model_dump(mode="json", exclude_none=True)


def list_places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Places of all plain values of a document."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from list_places(item, (*place, key))
    else:
        yield place


def find(values: Any, place: Place) -> Any:
    for part in place:
        values = values[part]
    return values


def multiply(old: Any, factor: float) -> Any:
    """A number, or a text of a number and its unit, times ``factor``."""
    if not isinstance(old, str):
        return type(old)(old * factor)
    number, _, unit = old.partition(" ")
    return f"{float(number) * factor:.6f} {unit}"


def double(values: Any, place: Place) -> Device:
    values = copy.deepcopy(values)
    table, key = find(values, place[:-1]), place[-1]
    table[key] = multiply(table[key], 2.0)
    if "overlap" in place[-2:]:
        table[key] = min(table[key], 1.0)
    # What takes twice the time has half the rate.
    if key == "time" and "giga_ops" in table:
        table["giga_ops"] /= 2.0
    elif key == "giga_ops" and "time" in table:
        table["time"] = multiply(table["time"], 0.5)
    return Device.model_validate_json(json.dumps(values))


def list_figures() -> list[str]:
    """Every number of the phone's file with a unit, and every plain one."""
    values = read_phone()
    return [
        ".".join(map(str, place))
        for place in list_places(values)
        if NAMES.isdisjoint(map(str, place))
        and place[-1] != "source"
        and str(find(values, place))[:1].isdigit()
    ]


def change(figure: str) -> Device:
    place = tuple(int(part) if part.isdigit() else part for part in figure.split("."))
    return double(read_phone(), place)


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
    before, after = predict_phone(), predict(change(figure))
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
        for old, new in zip(before, find_energy(change(figure)), strict=True):
            assert 1.1 * old < new <= 2.0 * old


TURN = 1e-2
"""A line through two measurements turns a little where one of them moves."""
PROBED = {"time", "rate", "giga_ops", "value", "latency", "overlap"}
"""Keys of figures that a probe measures."""
PLANS: dict[str, dict[str, Any]] = {
    "low-rank, io_uring": {"decode": {"predictor": "low-rank", "look_ahead": "layer"}},
    "gates, threads": {"decode": {"predictor": "gate"}, "io": {"engine": "pread", "threads": 4}},
    "dense": {"decode": {"predictor": "none"}},
}
MATTERS_MEASURED = {
    "low-rank, io_uring": {"project 10240", "predict 14336", "gather 2048", "random 7 KiB 128 1"},
    "gates, threads": {"project 10240", "random 8 KiB None 4"},
    "dense": {"project 10240", "sequential 4 MiB None 1"},
}


def name_figure(table: dict[str, Any]) -> str:
    names = ("kernel", "size", "pattern", "block", "depth", "threads", "burst")
    kept = [item for item in names if item in table or (item == "depth" and "block" in table)]
    return " ".join(str(table.get(item)) for item in kept)


def resolve(device: Device, plan: str) -> ResolvedPlan:
    sizes = {"kv": 128, "hot": 1280, "cold": 400}
    return resolve_probed(device, "4 GiB", sizes, 0.4, **PLANS[plan])


def predict_probed(device: Device, plan: str) -> dict[str, float]:
    rates = read_rates(device, read_model("bamboo-7b").shape.stored_hidden)
    cost = cost_resolved(resolve(device, plan), rates)
    assert cost.prefill_tokens_s is not None
    return {"planned": cost.tokens_s, "planned prompt": cost.prefill_tokens_s}


def simulate_speed(device: Device, plan: str) -> float:
    return simulate(read_inputs(resolve(device, plan)), tokens=8).tokens_s


@pytest.mark.parametrize("plan", keep_quick(PLANS, list(PLANS)[:1]))
def test_a_doubled_figure_of_a_probe_moves_predictions_in_the_right_direction(plan: str) -> None:
    values = read_probed()
    usual = Device.model_validate_json(json.dumps(values))
    before, simulated = predict_probed(usual, plan), simulate_speed(usual, plan)
    moved, wrong = set(), []
    for place in (place for place in list_places(values) if place[-1] in PROBED):
        device = double(values, place)
        after = predict_probed(device, plan)
        changes = {key: after[key] / before[key] - 1.0 for key in before}
        if max(map(abs, changes.values())) > TURN:
            # The simulator is slower: only what matters for the planner.
            changes["simulated"] = simulate_speed(device, plan) / simulated - 1.0
        worse = place[-1] in ("time", "latency") or place[0] == "noise"
        low, high = (-0.5 - TURN, TURN) if worse else (-TURN, 1.0 + TURN)
        name = name_figure(find(values, place[:-1]))
        wrong += [
            f"{'.'.join(map(str, place))} {name}: {key} {change:+.1%}"
            for key, change in changes.items()
            if not low <= change <= high
        ]
        if abs(changes["planned"]) > 0.01:
            moved.add(name)
    assert not wrong, "\n".join(wrong)
    assert moved >= MATTERS_MEASURED[plan], moved
