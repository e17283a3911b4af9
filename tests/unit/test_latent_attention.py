"""Latent attention keeps one short vector of each token, and mixtures of today come from the
disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.fitting.check import load_plan
from pi2.fitting.sizes import find_needs
from tests.helpers.goldens import (
    CPU,
    EXACT,
    ROUNDING,
    UNROUNDED,
    make_golden_plan,
    measure_error,
    read_golden,
)

INT8_ROUNDING = 1e-2
"""Both backends round what is kept to 8 bits; values that differ a little are rounded apart."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("deepseek-v3", tmp_path_factory.mktemp("latent"))


def test_the_cache_has_one_vector_for_all_heads(plan: Path) -> None:
    """Of each token 20 + 8 elements, instead of 4 heads with 20 of keys and 12 of values."""
    resolved = load_plan(plan)
    assert resolved.model.shape.layers == 2
    assert find_needs(resolved).kv.bytes == 2 * 64 * (20 + 8) * 2


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_backends_agree_about_what_is_kept_rounded(plan: Path, kind: str) -> None:
    golden = read_golden("deepseek-v3")
    found = {}
    for backend in ("reference", "cpu"):
        changes = {**UNROUNDED, "backends.cpu": backend, "kv.type": kind}
        with pi2.load(plan, set=changes) as model:
            found[backend] = model.logits(golden.prompt)
    assert measure_error(found["cpu"], found["reference"]) <= INT8_ROUNDING


def test_backends_agree_about_int4_weights(tmp_path: Path) -> None:
    golden = read_golden("deepseek-v3")
    plan = make_golden_plan("deepseek-v3", tmp_path, dict.fromkeys(EXACT, "int4"))
    with pi2.load(plan) as model:
        expected = model.logits(golden.prompt)
    with pi2.load(plan, set=CPU) as model:
        assert measure_error(model.logits(golden.prompt), expected) <= ROUNDING


def test_sequences_of_a_batch_are_what_each_is_alone(plan: Path) -> None:
    prompts = [[3, 4, 5, 9, 11], [60, 7], [8, 30, 31]]
    with pi2.load(plan, set={**CPU, "decode.batch": 3}) as model:
        forward = model._parts.forward
        for place, prompt in enumerate(prompts):
            forward.prefill(np.array(prompt, np.int32), sequence=place)
        rows = [row.copy() for row in forward.step([10, 20, 30], [0, 1, 2])]
        needs, used = find_needs(model.plan), model._parts.budget.used_bytes
        for name, need in needs.items():
            assert name == "cold" or used[name] <= need.bytes, name
    for prompt, token, row in zip(prompts, (10, 20, 30), rows, strict=True):
        with pi2.load(plan, set=CPU) as model:
            alone = model.logits([*prompt, token], mode="decode")[-1]
        assert measure_error(row, alone) <= ROUNDING


@pytest.mark.parametrize(
    ("name", "backend"), [("deepseek-v3", CPU), ("gpt-oss", CPU), ("granite-moe-shared", {})]
)
def test_mixtures_larger_than_memory_give_the_same_bits(
    tmp_path: Path, name: str, backend: dict[str, Any]
) -> None:
    """Also where layers have one FFN, experts have biases, or the last shared expert is short."""
    golden, plan = read_golden(name), make_golden_plan(name, tmp_path)
    routed = {**backend, "decode.predictor": "router"}
    with pi2.load(plan, set=routed | {"layers.hot": 1.0}) as model:
        expected = model.logits(golden.prompt, mode="decode")
    need = find_needs(load_plan(plan, overrides=routed | {"layers.hot": 0.0})).cold.bytes
    little = routed | {"layers.hot": 0.0, "memory.segments.cold": f"{need} B"}
    with pi2.load(plan, set=little) as model:
        np.testing.assert_array_equal(model.logits(golden.prompt, mode="decode"), expected)
        assert model.stats.flash_read_bytes > 0
    assert measure_error(expected, golden.logits) <= ROUNDING
