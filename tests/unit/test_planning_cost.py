"""What a plan costs: terms add up, and every figure moves them in the right direction."""

import json
from pathlib import Path
from typing import Any

import pytest

from pi2.costs.cost import Cost, cost_plan, cost_resolved
from pi2.costs.rates import read_rates
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from tests.helpers.programs import Ask

HALF = Path(__file__).parents[2] / "tools/paper/plans/oneplus-12/bamboo-7b-half.plan.toml"


def load_half(**overrides: Any) -> ResolvedPlan:
    return load_plan(HALF, overrides=overrides)


def change_device(resolved: ResolvedPlan, change: Any) -> Cost:
    values = resolved.device.model_dump(mode="json", exclude_none=True)
    change(values)
    return cost_resolved(resolved, read_rates(Device.model_validate_json(json.dumps(values))))


def test_a_row_of_the_embedding_takes_a_read_of_weights_and_one_of_scales() -> None:
    usual, cost = cost_plan(load_half()), cost_plan(load_half(**{"memory.embedding": "flash"}))
    assert cost.embedding_s == pytest.approx(2 * 70e-6)
    assert cost.token_s == pytest.approx(usual.token_s + cost.embedding_s)
    assert usual.memory_bytes - cost.memory_bytes > 100 << 20


def test_what_the_context_lends_holds_neurons() -> None:
    usual, cost = cost_plan(load_half()), cost_plan(load_half(**{"kv.lend": True}))
    assert cost.hit_rate > usual.hit_rate and cost.token_s < usual.token_s
    lent = cost.memory_bytes - usual.memory_bytes
    assert 0 < lent <= load_half().plan.memory.segments.kv
    late = cost_plan(load_half(**{"kv.lend": True}), position=4096)
    assert late.hit_rate == pytest.approx(usual.hit_rate), "a full context lends nothing"


def test_the_published_phone_comes_out_near_what_was_published() -> None:
    """PowerInfer-2, Fig 7: 11.1 tokens/s with half of the FFN in flash."""
    assert cost_plan(load_half()).tokens_s == pytest.approx(11.1, rel=0.35)


def test_where_reading_needs_the_cores_nothing_is_hidden() -> None:
    def change(values: Any) -> None:
        values["storage"]["overlap"] = {"value": 0.0, "status": "estimated", "source": "a test"}

    resolved = load_half()
    before, after = cost_plan(resolved), change_device(resolved, change)
    assert after.layers[0].wait_s == pytest.approx(after.layers[0].read_s)
    assert after.tokens_s < before.tokens_s
    assert before.prefill_tokens_s is not None and after.prefill_tokens_s is not None
    assert after.prefill_tokens_s < before.prefill_tokens_s


def test_looking_ahead_hides_reads() -> None:
    waits = [
        sum(layer.wait_s for layer in cost_plan(load_half(**{"decode.look_ahead": mode})).layers)
        for mode in ("none", "attention", "layer")
    ]
    assert waits[0] > waits[1] >= waits[2]


def test_a_plan_that_keeps_everything_reads_nothing() -> None:
    resolved = load_plan(HALF.parents[1] / "cloud-vm-zen5/mistral-7b.plan.toml")
    cost = cost_plan(resolved)
    assert cost.hit_rate == 1.0
    assert all(layer.read_s == layer.wait_s == 0.0 for layer in cost.layers)
    assert cost.memory_bytes <= resolved.plan.memory.budget


def test_explain_shows_every_term_by_layer(ask: Ask) -> None:
    text = ask(["explain", str(HALF), "--cost"]).out
    for word in ("Predicted:", "attention", "look up", "wait", "| 0-31 |", "Sources"):
        assert word in text


def test_a_picture_needs_a_cost(ask: Ask) -> None:
    assert "--cost" in ask(["explain", "P210", "--plot", "x.png"], 2).err


def test_the_split_of_the_plan_s_sequences_counts() -> None:
    room = {"memory.segments.hot": "4 GiB", "memory.segments.kv": "1 GiB", "memory.budget": "12 GB"}
    batches = [{"sequences": 2, "split": {"npu": 0.2, "cpu": 0.8}}]
    usual = load_half(**room, **{"decode.batch": 2})
    other = load_half(**room, **{"decode.batch": 2, "layers.batches": batches})
    few, many = cost_plan(other).layers[0], cost_plan(usual).layers[0]
    assert few.dense_s < many.dense_s and few.compute_s > many.compute_s


def test_what_is_taken_to_be_otherwise_than_the_engine_has_it_is_said(ask: Ask) -> None:
    def explain(*settings: str) -> list[str]:
        lines = ask(["explain", str(HALF), "--cost", *settings]).out.splitlines()
        return [line for line in lines if line.startswith("Assumed: ")]

    assert explain() == []
    counted = [f'backends.{kind}="null"' for kind in ("cpu", "gpu", "npu")]
    settings = [part for item in ('prefill.unit="gpu"', *counted) for part in ("--set", item)]
    (said,) = explain(*settings)
    assert said == "Assumed: cpu computes prompts; gpu does in pi2's engine."
    resolved = load_half()

    def forget(values: Any) -> None:
        del values["units"]["npu"]["read_bandwidth"]
        values["memory"].pop("peak_bandwidth", None)  # of which programs reach a part

    assert "npu takes no time, the device has no rates of it" in (
        change_device(resolved, forget).inputs.assumptions
    )
