"""A plan that gets more memory is never predicted or simulated to be slower."""

import itertools
import random

import pytest

from pi2.costs.cost import Description, cost_description, describe_plan
from pi2.fitting.budget import Shortage, fit_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.simulate import simulate
from tests.helpers.slow import keep_quick
from tools.compare_predictions import Cell, make_plan, read_model

DEVICES = ("oneplus-12", "oneplus-ace-2", "cloud-vm-zen5", "raspberry-pi-5", "probed")
MODELS = ("bamboo-7b", "relullama-7b", "mistral-7b", "turbosparse-mixtral-47b", "mixtral-8x7b")
NPU_DEVICES = ("oneplus-12", "oneplus-ace-2", "oneplus-ace-3", "galaxy-s24-ultra")
NPU_MODELS = ("bamboo-7b", "prosparse-llama-2-13b", "relullama-7b", "mistral-7b")
NPU_SHARES = (0.1, 0.3, 0.45)
"""Not more than an NPU computes in the time that the processor takes for the others, or a little
more: of a share that is too large for it, less is faster, and that much memory alone allows."""
NOISE = 0.002
"""Neurons are whole ones."""


def draw_plan(source: random.Random, *, npu: bool = False) -> ResolvedPlan:
    """Any plan on the processor, or with an NPU beside it, with all neurons in memory."""
    name = source.choice(NPU_MODELS if npu else MODELS)
    device = source.choice(NPU_DEVICES if npu else DEVICES)
    model = read_model(name)
    modes = ["none", *(["low-rank"] * 2 if model.predictor else [])]
    modes += [] if model.is_smooth or npu else ["gate"]
    modes += [] if model.moe is None else ["router"]
    predictor = source.choice(modes)
    looks = predictor in ("low-rank", "router")
    cell = Cell(
        device=device, model=name, predictor=predictor, memory=1.0, cache=0.1,
        threads=source.choice((None, None, 2)), batch=source.choice((1, 1, 4)),
        look_ahead=source.choice(("none", "layer")) if looks else "none",
        policy=source.choice(("lfu", "lru")), dense=source.choice(NPU_SHARES) if npu else 0.0,
        prompt=128,
    )  # fmt: skip
    return make_plan(cell)


def describe_steps(plan: ResolvedPlan, count: int) -> list[Description]:
    """The plan within ``count`` budgets of equal distance, those left out that are too small."""
    most, found = plan.plan.memory.budget, []
    for step in range(1, count + 1):
        try:
            fitted = fit_plan(plan, most * step // count)
        except Shortage:
            continue
        found.append(describe_plan(fitted, position=76))
    return found


@pytest.mark.parametrize("npu", [False, True])
@pytest.mark.parametrize("seed", keep_quick(range(6), range(2)))
def test_no_step_of_memory_is_predicted_to_be_slower(seed: int, npu: bool) -> None:
    plan = draw_plan(random.Random(seed), npu=npu)
    costs = [cost_description(item, 128) for item in describe_steps(plan, 30)]
    assert len(costs) > 10
    for before, after in itertools.pairwise(costs):
        assert after.tokens_s >= before.tokens_s * (1 - NOISE)
        if before.prefill_tokens_s is not None:
            assert after.prefill_tokens_s is not None
            assert after.prefill_tokens_s >= before.prefill_tokens_s * (1 - NOISE)


@pytest.mark.parametrize("seed", range(4))
def test_no_step_of_memory_is_simulated_to_be_slower(seed: int) -> None:
    plan = draw_plan(random.Random(100 + seed), npu=seed % 2 == 1)
    speeds = [
        simulate(item, prompt_tokens=64, tokens=32).tokens_s for item in describe_steps(plan, 8)
    ]
    assert len(speeds) > 2
    assert all(b >= a * (1 - NOISE) for a, b in itertools.pairwise(speeds))


def test_what_a_unit_computes_is_no_matter_of_memory() -> None:
    plan = draw_plan(random.Random(3), npu=True)
    assert plan.plan.layers.split is not None
    stated, most = plan.plan.layers.split["npu"], plan.plan.memory.budget
    splits = [fit_plan(plan, most * step // 10).plan.layers.split for step in range(6, 11)]
    assert [split and split["npu"] for split in splits] == [stated] * 5
