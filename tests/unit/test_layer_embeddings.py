"""Small models of Gemma 4: embeddings of layers that stay on flash, last layers without keys and
values of their own, and FFNs of two widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.backends.gpu.alone.sizes import find_alone_limits
from pi2.backends.protocol import ContextKeeper
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.fitting.sizes import find_needs
from pi2.importing.new_model import describe_checkpoint
from pi2.model.blocks import find_attention
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from tests.helpers.goldens import (
    CPU,
    EXACT,
    ROUNDING,
    change_config,
    check_sequences_together,
    compute_decoded,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
    write_plan,
)

NAME = "gemma4-e2b"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan(NAME, tmp_path_factory.mktemp(NAME))


def test_layers_read_keys_and_values_of_the_last_one_that_is_like_them(plan: Path) -> None:
    model = load_plan(plan).model
    attention = [find_attention(model, layer) for layer in range(6)]
    assert [own.key_layer for own in attention] == [None, None, None, 1, 2, 1]
    # Queries alone: 4 heads of 20 or of 36 elements; else a key and a value as well.
    assert [own.projected for own in attention] == [6 * 20, 6 * 36, 6 * 20, 4 * 36, 4 * 20, 4 * 36]


def test_a_plan_counts_keys_and_values_once(plan: Path) -> None:
    resolved = load_plan(plan)
    # Two layers with a head of 20 elements, one with a head of 36.
    assert find_needs(resolved).kv.bytes == 2 * 64 * 2 * (2 * 20 + 36)


def test_the_table_of_embeddings_stays_on_flash(plan: Path) -> None:
    resolved = load_plan(plan, overrides={"prefill.chunk": 16})
    # 96 rows of 6 layers with 20 elements each, in whole groups, fp16; 16 of them in memory.
    whole, some = 96 * 2 * 128, 16 * 2 * 128
    assert (
        find_needs(resolved).attention.bytes < _count_dense_bytes(resolved.model) - whole + 2 * some
    )


def _count_dense_bytes(model: Model) -> int:
    tensors = list_tensors(model, None)
    sizes = ((tensor.row_weight_bytes + tensor.row_scale_bytes) * tensor.rows for tensor in tensors)
    return sum(-(-size // 64) * 64 for size in sizes)


@pytest.mark.parametrize("backend", [{}, CPU])
def test_sequences_together_compute_what_they_do_alone(plan: Path, backend: dict[str, Any]) -> None:
    check_sequences_together(plan, backend)


@pytest.mark.parametrize("backend", [{}, CPU])
def test_what_was_kept_of_a_prefix_serves_another_sequence(
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
        assert measure_error(forward.step([7], [1]), expected) <= ROUNDING


@pytest.mark.parametrize("backend", [{}, CPU])
def test_neurons_may_come_from_flash_and_zeros_are_not_read(
    plan: Path, backend: dict[str, Any]
) -> None:
    golden = read_golden(NAME)
    routed = {**backend, "decode.predictor": "router"}
    expected = compute_decoded(plan, golden.prompt, routed | {"layers.hot": 1.0})
    assert measure_error(expected, golden.logits) <= ROUNDING
    resolved = load_plan(plan, overrides=routed | {"layers.hot": 0.0})
    little = routed | {
        "layers.hot": 0.0,
        "memory.segments.cold": f"{find_needs(resolved).cold.bytes} B",
        "prefill.chunk": 8,
    }
    with pi2.load(plan, set=little) as model:
        np.testing.assert_array_equal(model.logits(golden.prompt, mode="decode"), expected)
        assert model.stats.flash_read_bytes > 0
        prompt = model.logits(golden.prompt, mode="prefill")
        assert measure_error(prompt, golden.logits) <= ROUNDING


def test_layers_have_as_many_neurons_as_their_ffn(plan: Path) -> None:
    with pi2.load(plan, set={"decode.predictor": "router"}) as model:
        executor = model._parts.executor
        executor.embed(np.array([5], np.int32))
        found = []
        for layer in range(6):
            executor.attend(layer, 0)
            executor.begin_ffn(layer)
            found.append(executor.list_experts().tolist())
            executor.end_ffn(layer)
    assert found == [[0], [0], [0], [0, 1], [0, 1], [0, 1]]


def test_tokens_beyond_the_table_have_its_first_row(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(NAME, tmp_path / "checkpoint")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens_per_layer.weight"]
    tensors["model.embed_tokens_per_layer.weight"] = table[:40].copy()
    save_file(tensors, file)
    change_config(checkpoint, vocab_size_per_layer_input=40)
    short = write_plan(tmp_path, convert_golden(checkpoint, tmp_path, EXACT), {})
    found = compute_decoded(short, [5, 39, 70, 95], {})
    table[40:] = table[0]
    whole = copy_checkpoint(NAME, tmp_path / "whole")
    tensors["model.embed_tokens_per_layer.weight"] = table
    save_file(tensors, whole / "model.safetensors")
    folder = tmp_path / "other"
    folder.mkdir()
    plan = write_plan(folder, convert_golden(whole, folder, EXACT), {})
    np.testing.assert_array_equal(found, compute_decoded(plan, [5, 39, 70, 95], {}))


def test_what_has_no_kernels_for_it_says_so(plan: Path) -> None:
    limits = find_alone_limits(load_plan(plan))
    for key in ("layer_embedding", "attention.kv_shared_layers", 'moe.router = "none"'):
        assert any(key in limit for limit in limits), key


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_kv_shared_layers": 5}, "attention.kv_shared_layers: no layer before the last 5"),
        ({"hidden_activation": "relu"}, "layer_embedding: embeddings of layers need a smooth"),
    ],
)
def test_what_no_document_states_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    checkpoint = copy_checkpoint(NAME, tmp_path / "checkpoint")
    change_config(checkpoint, **changes)
    with pytest.raises(UserError, match="P544") as caught:
        describe_checkpoint(checkpoint)
    assert problem in str(caught.value)
