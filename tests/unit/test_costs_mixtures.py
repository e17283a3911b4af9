"""What predictions take the layers of mixtures to be: dense ones, shared experts, chosen ones."""

import pytest

from pi2.costs.activity import describe_activity
from pi2.plan.documents.model import Model
from pi2.planning.planner import plan
from pi2.planning.wish import Wish
from tests.helpers.shipped_plans import read_device, read_model

GIB = 1 << 30
DEEPSEEK = {"experts": 256, "active_experts": 8, "shared_experts": 1}


def make_deepseek(active: int) -> Model:
    """A mixture whose first layer's FFN is as wide as nine experts."""
    model = read_model("glm-4.7-flash")
    assert model.moe is not None
    changes = {**DEEPSEEK, "active_experts": active, "dense_ffn": 9 * model.shape.ffn}
    return model.model_copy(update={"moe": model.moe.model_copy(update=changes)})


def test_a_token_computes_each_layers_own_neurons() -> None:
    # One dense FFN of 10240, then 46 layers of four experts and a shared one, 1536 each.
    model = read_model("glm-4.7-flash")
    assert model.token_neurons == 10240 + 46 * 5 * 1536
    assert [block.ffn.active for block in model.blocks[:2]] == [7, 5]
    assert model.most_active == 7, "memory is for the layer with most"
    used = sum(layer.used for layer in describe_activity(model, "router")[0])
    assert used == pytest.approx(model.token_neurons)


def test_fewer_active_experts_are_predicted_to_be_faster() -> None:
    device = read_device("xiaomi-14")
    speeds = [
        plan(Wish(device=device, model=make_deepseek(active), memory_bytes=12 * GIB)).cost.tokens_s
        for active in (6, 8)
    ]
    assert speeds[0] > 1.05 * speeds[1]
