"""Layers whose heads differ: each keeps and computes what its own heads need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.backends.gpu.alone.sizes import find_alone_limits
from pi2.backends.protocol import ContextKeeper
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.fitting.sizes import find_needs
from pi2.importing.config import Config
from pi2.importing.families import describe_family
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.arithmetic.units import count_kv_token_bytes
from tests.helpers.goldens import (
    CPU,
    FOLDER,
    ROUNDING,
    change_config,
    check_sequences_together,
    compute_decoded,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
)
from tests.helpers.models import count_tensor_bytes

KINDS = ("qkv", "qkv_bias", "query_norm", "key_norm", "output", "output_bias")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("gemma4", tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def mixture_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("gemma4-moe", tmp_path_factory.mktemp("gemma4-moe"))


@pytest.fixture(scope="module")
def query_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers differ in their query heads alone, with experts."""
    return make_golden_plan("laguna", tmp_path_factory.mktemp("laguna"))


@pytest.mark.parametrize("backend", [{}, CPU], ids=["reference", "cpu"])
def test_layers_with_more_queries_are_computed_for_several_sequences(
    query_plan: Path, backend: dict[str, Any]
) -> None:
    check_sequences_together(query_plan, backend)


@pytest.mark.parametrize("backend", [{}, CPU], ids=["reference", "cpu"])
def test_layers_with_more_queries_give_the_same_bits_beyond_memory(
    query_plan: Path, backend: dict[str, Any]
) -> None:
    ids, routed = [5, 9, 33, 60, 12, 7, 41], {**backend, "decode.predictor": "router"}
    whole = compute_decoded(query_plan, ids, {**routed, "layers.hot": 1.0})
    for changes in ({"layers.hot": 0.1}, {"layers.hot": 0.0, "memory.segments.cold": "64 KiB"}):
        np.testing.assert_array_equal(compute_decoded(query_plan, ids, routed | changes), whole)


def test_a_plan_counts_queries_of_each_layer(query_plan: Path) -> None:
    # 32 and 96 elements of queries and as many gates, 64 of keys and values; 48 read fill 64.
    narrow, wide = 2 * ((64 + 64) * 64 + 64 * 32), 2 * ((192 + 64) * 64 + 64 * 96)
    # Biases of these rows and of the output, and two norms.
    narrow, wide = narrow + 4 * (128 + 64) + 2 * 64, wide + 4 * (256 + 64) + 2 * 64
    assert count_tensor_bytes(load_plan(query_plan).model, *KINDS) == 2 * narrow + wide


def test_a_plan_counts_keys_values_and_projections_of_each_layers_heads(plan: Path) -> None:
    resolved = load_plan(plan)
    model = resolved.model
    # Two layers with 2 heads of 20 elements, two with one of 36.
    kept = 2 * (2 * 2 * 20 + 2 * 36)
    assert find_needs(resolved).kv.bytes == 2 * 64 * kept
    assert "2 layers x 64 tokens x 36 elements" in find_needs(resolved).kv.explanation
    assert count_kv_token_bytes(model, "fp16") == 2 * kept // 4
    # 48 elements of the residual stream fill two groups of 32; 80 and 144 of the heads, 96 and 160.
    narrow = 2 * (4 * 20 + 2 * 2 * 20) * 64 + 2 * 64 * 96 + 2 * 128
    wide = 2 * (4 * 36 + 2 * 36) * 64 + 2 * 64 * 160 + 2 * 192
    assert count_tensor_bytes(model, *KINDS) == 2 * (narrow + wide)


@pytest.mark.parametrize("backend", [{}, CPU])
def test_sequences_together_compute_what_they_do_alone(plan: Path, backend: dict[str, Any]) -> None:
    check_sequences_together(plan, backend)


@pytest.mark.parametrize("backend", [{}, CPU, {"kv.type": "int8"}])
def test_keys_and_values_that_were_kept_serve_another_sequence(
    plan: Path, backend: dict[str, Any]
) -> None:
    ids = np.random.default_rng(3).integers(3, 96, 20).tolist()
    with pi2.load(plan, set={**backend, "decode.batch": 2}) as model:
        forward, executor = model._parts.forward, model._parts.executor
        assert isinstance(executor, ContextKeeper)
        forward.prefill(np.array(ids, np.int32), sequence=0)
        expected = forward.step([7], [0]).copy()
        forward.prefill(np.array(ids[16:] * 5, np.int32), sequence=1)
        executor.put_context(1, 0, 16, executor.read_context(0, 0, 16))
        forward.positions[1] = 16
        for token in ids[16:]:
            forward.step([token], [1])
        error = measure_error(forward.step([7], [1]), expected)
    assert error <= (ROUNDING if backend.get("kv.type") != "int8" else 1e-2)


def test_what_has_no_kernels_for_it_says_so(mixture_plan: Path) -> None:
    limits = find_alone_limits(load_plan(mixture_plan))
    keys = ("other_heads", "layer_scale", "attention.value_norm", "rope.kind")
    for key in (*keys, "side_ffn", "moe.router_input", "moe.expert_scale"):
        assert any(key in limit for limit in limits), key


@pytest.mark.parametrize("backend", [{}, CPU])
def test_experts_beside_an_ffn_may_come_from_flash(
    mixture_plan: Path, backend: dict[str, Any]
) -> None:
    golden = read_golden("gemma4-moe")
    routed = {**backend, "decode.predictor": "router"}
    expected = compute_decoded(mixture_plan, golden.prompt, routed | {"layers.hot": 1.0})
    assert measure_error(expected, golden.logits) <= ROUNDING
    need = find_needs(load_plan(mixture_plan, overrides=routed | {"layers.hot": 0.0})).cold.bytes
    little = routed | {"layers.hot": 0.0, "memory.segments.cold": f"{need} B"}
    with pi2.load(mixture_plan, set=little | {"decode.look_ahead": "layer"}) as model:
        np.testing.assert_array_equal(model.logits(golden.prompt, mode="decode"), expected)
        assert model.stats.flash_read_bytes > 0


def test_several_tokens_take_the_ffn_beside_their_experts(mixture_plan: Path) -> None:
    golden = read_golden("gemma4-moe")
    rounded = {"backends.cpu": "cpu", "decode.batch": 2, "decode.predictor": "router"}
    with pi2.load(mixture_plan, set=rounded) as model:
        forward = model._parts.forward
        for place in (0, 1):
            forward.prefill(np.array(golden.prompt[:9], np.int32), sequence=place)
        for token, logits in zip(golden.prompt[9:], golden.logits[9:], strict=True):
            for row in forward.step([token, token], [0, 1]):
                assert measure_error(row, logits) <= 1e-2


def test_first_releases_state_other_heads_once_for_all_layers(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma4", tmp_path / "checkpoint")
    expected = describe_checkpoint(checkpoint).model
    change_config(
        checkpoint, per_layer_config=None, global_head_dim=36, num_global_key_value_heads=1
    )
    assert describe_checkpoint(checkpoint).model == expected
    assert expected.other_heads is not None and expected.other_heads.layers == (1, 3)


def test_the_last_layer_never_has_a_window() -> None:
    values = json.loads((FOLDER / "gemma4/config.json").read_text())
    values |= {"layer_types": None, "per_layer_config": None, "num_hidden_layers": 8}
    tables = describe_family(Config(FOLDER, values))
    assert tables["other_heads"]["layers"] == [5, 7]
    assert tables["attention"]["window_layers"] == [0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"per_layer_config": {"0": {"head_dim": 36}}}, "does not divide layers"),
        ({"num_kv_shared_layers": 4}, "no layer before the last 4"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ],
)
def test_what_no_document_states_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    checkpoint = copy_checkpoint("gemma4", tmp_path / "checkpoint")
    change_config(checkpoint, **changes)
    with pytest.raises(UserError, match="P544") as caught:
        describe_checkpoint(checkpoint)
    assert problem in str(caught.value)
