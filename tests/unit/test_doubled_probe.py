"""A measured device with one figure doubled moves planner and simulator in the right direction.

The device is one that `pi2 probe` wrote on two cores of a Skylake server; `test_doubled_figures`
does the same for a phone whose figures were published.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pi2.costs.cost import cost_resolved
from pi2.costs.rates import read_rates
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.simulate import read_inputs, simulate
from tests.helpers.shipped_plans import read_model, read_probed, resolve_probed
from tests.helpers.slow import keep_quick

NOISE = 1e-2
"""A line through two measurements turns a little where one of them moves."""
KEYS = {"time", "rate", "giga_ops", "value", "latency", "overlap"}
PLANS: dict[str, dict[str, Any]] = {
    "low-rank, io_uring": {"decode": {"predictor": "low-rank", "look_ahead": "layer"}},
    "gates, threads": {"decode": {"predictor": "gate"}, "io": {"engine": "pread", "threads": 4}},
    "dense": {"decode": {"predictor": "none"}},
}
MATTERS = {
    "low-rank, io_uring": {"project 10240", "predict 14336", "gather 2048", "random 7 KiB 128 1"},
    "gates, threads": {"project 10240", "random 8 KiB None 4"},
    "dense": {"project 10240", "sequential 4 MiB None 1"},
}


def list_figures(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict | list):
                yield from list_figures(item, (*path, key))
            elif key in KEYS:
                yield (*path, key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from list_figures(item, (*path, number))


def double(values: Any, path: tuple[str | int, ...]) -> tuple[Device, str, bool]:
    """The device with a figure times two, the figure's name, and whether that is better."""
    values = copy.deepcopy(values)
    place = values
    for part in path[:-1]:
        place = place[part]
    key = path[-1]
    old = place[key]
    if key == "overlap" or path[-2] == "overlap":
        place[key] = min(2.0 * old, 1.0)
    elif isinstance(old, str):
        number, _, unit = old.partition(" ")
        place[key] = f"{2.0 * float(number):.6f} {unit}"
    else:
        place[key] = 2.0 * old
    # What takes twice the time has half the rate.
    if key == "time" and "giga_ops" in place:
        place["giga_ops"] /= 2.0
    elif key == "giga_ops" and "time" in place:
        number, _, unit = place["time"].partition(" ")
        place["time"] = f"{0.5 * float(number):.6f} {unit}"
    names = ("kernel", "size", "pattern", "block", "depth", "threads", "burst")
    kept = [
        place.get(item) for item in names if item in place or (item == "depth" and "block" in place)
    ]
    worse = key in {"time", "latency"} or path[0] == "noise"
    return Device.model_validate_json(json.dumps(values)), " ".join(map(str, kept)), not worse


def resolve(device: Device, plan: str) -> ResolvedPlan:
    sizes = {"kv": 128, "hot": 1280, "cold": 400}
    return resolve_probed(device, "4 GiB", sizes, 0.4, **PLANS[plan])


def predict(device: Device, plan: str) -> dict[str, float]:
    resolved = resolve(device, plan)
    cost = cost_resolved(resolved, read_rates(device, read_model("bamboo-7b").shape.stored_hidden))
    assert cost.prefill_tokens_s is not None
    return {"planned": cost.tokens_s, "planned prompt": cost.prefill_tokens_s}


def simulate_speed(device: Device, plan: str) -> float:
    return simulate(read_inputs(resolve(device, plan)), tokens=8).tokens_s


@pytest.mark.parametrize("plan", keep_quick(PLANS, list(PLANS)[:1]))
def test_a_doubled_figure_of_a_probe_moves_predictions_in_the_right_direction(plan: str) -> None:
    values = read_probed()
    usual = Device.model_validate_json(json.dumps(values))
    before = predict(usual, plan)
    simulated = simulate_speed(usual, plan)
    moved = set()
    wrong = []
    for path in list_figures(values):
        device, name, better = double(values, path)
        after = predict(device, plan)
        changes = {key: after[key] / before[key] - 1.0 for key in before}
        if max(map(abs, changes.values())) > NOISE:
            # The simulator is slower: only what matters for the planner.
            changes["simulated"] = simulate_speed(device, plan) / simulated - 1.0
        low, high = (-NOISE, 1.0 + NOISE) if better else (-0.5 - NOISE, NOISE)
        wrong += [
            f"{'.'.join(map(str, path))} {name}: {key} {change:+.1%}"
            for key, change in changes.items()
            if not low <= change <= high
        ]
        if abs(changes["planned"]) > 0.01:
            moved.add(name)
    assert not wrong, "\n".join(wrong)
    assert moved >= MATTERS[plan], moved
