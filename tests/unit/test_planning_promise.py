"""A run's speed beside what its plan promises, and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pi2.costs.cost import cost_plan
from pi2.fitting.check import load_plan
from pi2.planning.comparison import describe_promise, find_promise

PLANS = Path(__file__).parents[2] / "plans"
PAPER = PLANS.parent / "tools/paper/plans"
PROBED = PAPER / "cloud-vm-zen5/bamboo-7b-60.plan.toml"
PHONE = PAPER / "oneplus-12/bamboo-7b-half.plan.toml"


def test_only_a_probed_device_promises_anything() -> None:
    assert find_promise(load_plan(PHONE), 100) is None


def test_a_run_that_is_far_from_its_promise_asks_for_another_probe() -> None:
    cost = replace(cost_plan(load_plan(PROBED)), spreads={})
    near, slow, fast = (describe_promise(cost, cost.tokens_s * share) for share in (0.95, 0.5, 1.5))
    assert "as fast as that" in near and "pi2 probe" not in near
    assert "50% slower" in slow and "pi2 probe" in slow
    assert "50% faster" in fast


def test_what_measurements_were_apart_is_what_a_prediction_may_miss_by() -> None:
    plain = replace(cost_plan(load_plan(PROBED)), spreads={})
    steps = ("project", "predict", "gather", "multiply", "reads")
    rough = replace(plain, spreads=dict.fromkeys(steps, 0.4))
    assert plain.spread_tokens_s == 0.0
    assert 0.1 * plain.tokens_s < rough.spread_tokens_s < 0.4 * plain.tokens_s
    assert " ± " in describe_promise(rough, plain.tokens_s)
    assert "as fast as that" in describe_promise(rough, 0.75 * plain.tokens_s)
    assert "slower" in describe_promise(plain, 0.75 * plain.tokens_s)
