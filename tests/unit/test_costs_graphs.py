"""An NPU's programs have fixed numbers of tokens: what a job has fewer is computed as zeros."""

from pathlib import Path

import pytest

from pi2.costs.cost import Description, describe_plan
from pi2.costs.cost_layer import list_prompt_layers
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.units import pad_tokens

PLAN = Path(__file__).resolve().parents[2] / "plans/oneplus-12/bamboo-7b.plan.toml"
GRAPHS = (1, 2, 4, 32, 64, 128)
DRY: dict[str, object] = {"backends.cpu": "null", "backends.npu": "null"}
"""Backends that take any number of tokens."""


def describe(overrides: dict[str, object] | None = None) -> Description:
    return describe_plan(load_plan(PLAN, overrides=overrides))


def time_prompt(found: Description, tokens: int) -> float:
    """Seconds of what a prompt's layers compute."""
    layers = list_prompt_layers(found, tokens)
    assert layers is not None
    return sum((layer.before_s + layer.streamed_s) * layer.count for layer in layers)


@pytest.mark.parametrize(
    ("count", "padded"),
    [(1, 1), (3, 4), (5, 32), (32, 32), (100, 128), (128, 128), (130, 130), (200, 256), (260, 260)],
)
def test_largest_graphs_run_and_the_smallest_that_holds_the_rest(count: int, padded: int) -> None:
    assert pad_tokens(count, GRAPHS) == padded
    assert pad_tokens(count, ()) == count


def test_a_prompt_takes_as_long_as_the_graphs_that_hold_it() -> None:
    fixed, free = describe(), describe(DRY)
    assert time_prompt(fixed, 70) == pytest.approx(time_prompt(fixed, 128))
    assert time_prompt(free, 70) < 0.8 * time_prompt(free, 128)
    assert time_prompt(fixed, 128) == pytest.approx(time_prompt(free, 128))
