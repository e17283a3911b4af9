"""Every shipped plan runs through the whole engine with the null backend."""

from pathlib import Path

import pytest

import pi2
from tests.helpers.shipped_plans import PLANS, list_plans

SHIPPED = [path for path in list_plans() if "\nweights = " not in path.read_text("utf-8")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(PLANS)))
def test_a_shipped_plan_runs_dry(path: Path) -> None:
    nothing = {"backends": {"cpu": "null", "gpu": "null", "npu": "null"}}
    with pi2.load(path, set=nothing) as model:
        shape = model.plan.model.shape
        prompt = [1] * 8
        assert model.logits(prompt).shape == (8, shape.vocab)
        loaded = model.stats
        assert model.logits([1, 2, 3], mode="decode").shape == (3, shape.vocab)
        done = model.stats - loaded
        if model.plan.plan.decode.predictor == "none":
            assert done.flash_read_bytes > 0 or all(layer.hot == 1 for layer in model.plan.layers)
        else:
            moe = model.plan.model.moe
            # Predictors see the neurons of the experts that a token was routed to.
            seen = shape.ffn * (1 if moe is None else moe.active_experts)
            assert done.possible_neurons == 3 * shape.layers * seen
            assert done.cache_hits + done.cache_misses == done.predicted_neurons
            assert done.flash_read_bytes == done.cache_misses * model.plan.bundle.stride


def test_there_are_shipped_plans() -> None:
    assert len(SHIPPED) >= 1
