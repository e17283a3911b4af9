"""Small models of Gemma 4: embeddings of layers that stay on flash, last layers without keys and
values of their own, and FFNs of two widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.fitting.check import load_plan
from pi2.fitting.sizes import find_needs
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from tests.helpers.goldens import (
    EXACT,
    change_config,
    compute_decoded,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    write_plan,
)

NAME = "gemma4-e2b"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan(NAME, tmp_path_factory.mktemp(NAME))


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
