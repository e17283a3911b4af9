"""Delta rules whose decays are of keys, and gates of heads of latent attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import pi2
from tests.helpers.goldens import (
    EXACT,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    read_golden,
    write_plan,
)


def test_the_hub_names_ffns_of_layers_without_experts_otherwise(tmp_path: Path) -> None:
    prompt = read_golden("kimi-linear").prompt
    with pi2.load(make_golden_plan("kimi-linear", tmp_path / "written")) as model:
        truth = model.logits(prompt)
    checkpoint = copy_checkpoint("kimi-linear", tmp_path / "hub" / "checkpoint")
    file = checkpoint / "model.safetensors"
    old, new = "layers.0.block_sparse_moe.", "layers.0.mlp."
    tensors = load_file(file)
    assert any(old in name for name in tensors)
    save_file({name.replace(old, new): value for name, value in tensors.items()}, file)
    document = convert_golden(checkpoint, tmp_path / "hub", EXACT)
    with pi2.load(write_plan(tmp_path / "hub", document, {})) as model:
        np.testing.assert_array_equal(model.logits(prompt), truth)
