"""Whatever part of a mixture is in memory, a token has the same logits, bit by bit."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import pi2
from pi2.arrays import F32
from pi2.store.reader import NeuronStore
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import MIXTURE

TOKENS = [7, 100, 8, 290, 3, 41]
LAYERS, EXPERTS, CHOSEN, FFN = 2, 4, 3, 200
"""Half of three experts is no whole one: parts of a layer are not what granules or halves are."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {**MIXTURE, "predictor": None, "moe": {"experts": EXPERTS, "active_experts": CHOSEN}}
    return make_mixture_plan(tmp_path_factory.mktemp("mixture"), "silu", changes, order="index")


def compute(plan: Path, chosen: dict[str, Any]) -> tuple[F32, F32]:
    """Logits of tokens one by one, and of a prompt."""
    with pi2.load(plan, set={"decode.predictor": "router", **chosen}) as model:
        return model.logits(TOKENS, mode="decode"), model.logits(TOKENS)


@functools.cache
def compute_in_memory(plan: Path, backend: str) -> tuple[F32, F32]:
    return compute(plan, {"backends.cpu": backend})


@functools.cache
def find_stride(plan: Path) -> int:
    with NeuronStore.open(plan.parent / "store") as store:
        return store.manifest.bundle.layout.stride


@given(
    slots=st.integers(CHOSEN * FFN, LAYERS * EXPERTS * FFN),
    hot=st.sampled_from([0.0, 0.25, 0.3, 0.5]),
    policy=st.sampled_from(["lru", "lfu"]),
    look_ahead=st.sampled_from(["none", "attention", "layer"]),
    backend=st.sampled_from(["cpu", "reference"]),
)
@example(600, 0.0, "lru", "layer", "cpu")
@example(600, 0.3, "lfu", "none", "cpu")
@example(830, 0.3, "lfu", "layer", "cpu")
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_in_memory_changes_no_bit(
    plan: Path, slots: int, hot: float, policy: str, look_ahead: str, backend: str
) -> None:
    chosen: dict[str, Any] = {
        "backends.cpu": backend, "layers.hot": hot,
        "memory.segments.cold": f"{slots * find_stride(plan)} B", "memory.budget": "2 GiB",
        "cache.policy": policy, "cache.fill": slots % 2 == 0, "decode.look_ahead": look_ahead,
    }  # fmt: skip
    found, truth = compute(plan, chosen), compute_in_memory(plan, backend)
    for ours, theirs in zip(found, truth, strict=True):
        np.testing.assert_array_equal(ours, theirs)
