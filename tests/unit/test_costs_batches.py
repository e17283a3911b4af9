"""What several sequences that generate at the same time take, on a probed machine."""

import json
from typing import Any

import pytest

from pi2.costs.cost import Cost, cost_resolved
from pi2.costs.rates import read_rates
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from tests.helpers.shipped_plans import read_probed, resolve_probed

DEVICE = Device.model_validate_json(json.dumps(read_probed()))


def resolve(**decode: Any) -> ResolvedPlan:
    """A plan that has everything in memory."""
    sizes = {"kv": 1024, "hot": 4096, "cold": 0}
    chosen = {"predictor": "low-rank", **decode}
    return resolve_probed(DEVICE, "9 GiB", sizes, 1.0, decode=chosen)


def cost(**decode: Any) -> Cost:
    return cost_resolved(resolve(**decode), read_rates(DEVICE, 4096))


def sum_layers(found: Cost, name: str) -> float:
    return sum(getattr(layer, name) for layer in found.layers)


def test_a_sequence_alone_is_not_rounded() -> None:
    assert cost(batch_activations="int8").token_s == cost().token_s


@pytest.mark.parametrize("batch", [2, 8])
def test_rounded_steps_take_less_arithmetic_everywhere_but_in_the_head(batch: int) -> None:
    usual, rounded = cost(batch=batch), cost(batch=batch, batch_activations="int8")
    for name in ("attention_s", "predict_s", "compute_s"):
        assert sum_layers(rounded, name) < sum_layers(usual, name), name
    assert rounded.inputs.head_s == usual.inputs.head_s
    both = cost(batch=batch, batch_activations="int8", activations="fp32")
    assert both.token_s == cost(batch=batch, activations="fp32").token_s, "nothing is rounded"


@pytest.mark.parametrize(("batch", "measured"), [(2, 20.0), (4, 35.9), (8, 71.9)])
def test_neurons_of_several_sequences_take_what_was_measured(batch: int, measured: float) -> None:
    """Milliseconds of a step on two Zen 5 cores; of one 12.2 (docs/reference/performance.md)."""
    one, several = (sum_layers(cost(batch=count), "compute_s") for count in (1, batch))
    assert several / one == pytest.approx(measured / 12.2, rel=0.2)
