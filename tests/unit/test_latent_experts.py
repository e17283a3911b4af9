"""Experts may read and give vectors of another width than the residual stream's (Nemotron 3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.goldens import (
    CPU,
    ROUNDING,
    change_config,
    compute_decoded,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
    write_plan,
)

NAME = "nemotron-h-latent"
INT4 = dict.fromkeys(("ffn", "attention", "embedding", "head"), "int4")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan(NAME, tmp_path_factory.mktemp("latent"))


def test_experts_may_be_narrower_than_a_group(tmp_path: Path) -> None:
    """What fills their vectors up is zero, whatever was there before."""
    checkpoint = copy_checkpoint(NAME, tmp_path / "checkpoint")
    narrow_experts(checkpoint, 12)
    model = convert_golden(checkpoint, tmp_path, INT4)
    plan, prompt = write_plan(tmp_path, model, {}), read_golden(NAME).prompt
    expected, found = (compute_decoded(plan, prompt, backend) for backend in ({}, CPU))
    assert measure_error(found, expected) <= ROUNDING


def narrow_experts(checkpoint: Path, width: int) -> None:
    """Leave the first ``width`` elements of what experts read and give."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    for name, values in weights.items():
        if name.endswith(("fc1_latent_proj.weight", "experts.down_proj")):
            weights[name] = np.ascontiguousarray(values[..., :width, :])
        if ".experts." in name and name.endswith("down_proj.weight"):
            weights[name] = np.ascontiguousarray(values[:width])
        if name.endswith("fc2_latent_proj.weight") or (
            ".experts." in name and name.endswith("up_proj.weight")
        ):
            weights[name] = np.ascontiguousarray(values[:, :width])
    save_file(weights, checkpoint / "model.safetensors")
    change_config(checkpoint, moe_latent_size=width)
