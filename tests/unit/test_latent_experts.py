"""Experts may read and give vectors of another width than the residual stream's (Nemotron 3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.backends.gpu.alone.sizes import find_alone_limits
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.fitting.sizes import find_needs
from tests.helpers.goldens import (
    CPU,
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
from tests.helpers.models import count_tensor_bytes

NAME = "nemotron-h-latent"
INT4 = dict.fromkeys(("ffn", "attention", "embedding", "head"), "int4")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan(NAME, tmp_path_factory.mktemp("latent"))


def test_neurons_are_as_wide_as_what_experts_read(plan: Path) -> None:
    model = load_plan(plan).model
    assert (model.shape.hidden, model.neuron_width, model.stored_neuron_width) == (32, 40, 64)
    assert model.lay_out_bundle().hidden == 64
    # Two projections of 40 to 64 elements, and the shared FFN of 36 to 64, all fp16.
    kinds = ("experts_in", "experts_out", "side_in", "side_down")
    own = 2 * (40 * 32 + 32 * 64 + 36 * 32 + 32 * 64)
    assert count_tensor_bytes(model, *kinds) == model.shape.layers * own


@pytest.mark.parametrize("backend", [{}, CPU], ids=["reference", "cpu"])
def test_what_is_in_memory_changes_no_bit(plan: Path, backend: dict[str, Any]) -> None:
    golden = read_golden(NAME)
    routed = {**backend, "decode.predictor": "router"}
    expected = compute_decoded(plan, golden.prompt, routed | {"layers.hot": 1.0})
    assert measure_error(expected, golden.logits) <= ROUNDING
    need = find_needs(load_plan(plan, overrides=routed | {"layers.hot": 0.0})).cold.bytes
    little = routed | {"layers.hot": 0.0, "memory.segments.cold": f"{need} B"}
    with pi2.load(plan, set=little | {"decode.look_ahead": "layer"}) as model:
        np.testing.assert_array_equal(model.logits(golden.prompt, mode="decode"), expected)
        assert model.stats.flash_read_bytes > 0


@pytest.mark.parametrize("backend", [{}, CPU], ids=["reference", "cpu"])
def test_sequences_together_compute_what_they_do_alone(plan: Path, backend: dict[str, Any]) -> None:
    check_sequences_together(plan, backend)


def test_kernels_add_packed_neurons_up_as_the_reference_does(tmp_path: Path) -> None:
    """Sums are in another order than the elements where weights have 4 bits."""
    plan, golden = make_golden_plan(NAME, tmp_path, INT4), read_golden(NAME)
    expected, found = (
        compute_decoded(plan, golden.prompt, {**backend, "decode.predictor": "router"})
        for backend in ({}, CPU)
    )
    assert measure_error(found, expected) <= ROUNDING
    with pi2.load(plan, set={**CPU, "prefill.chunk": 24}) as model:
        assert measure_error(model.logits(golden.prompt), expected) <= ROUNDING


def test_a_dense_unit_reads_what_experts_read(plan: Path) -> None:
    two = {
        "device": "host-two-units",
        "backends": {"cpu": "cpu", "npu": "reference"},
        "layers.split": {"second": 0.3, "cpu": 0.7},
        "decode.predictor": "router",
    }
    golden = read_golden(NAME)
    with pi2.load(plan, set={**CPU, **two}) as model:
        assert measure_error(model.logits(golden.prompt), golden.logits) <= ROUNDING


def test_a_gpu_does_not_have_such_a_model_alone(plan: Path) -> None:
    limits = find_alone_limits(load_plan(plan))
    for key in ("moe.latent", "side_ffn"):
        assert any(key in limit for limit in limits), key


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[moe]\n", "[moe]\nshared_experts = 1\n", "what is shared in a table"),
        ("[moe]\n", '[moe]\nrouter = "none"\n', "a router"),
        ("norms = false", "norms = true", "norms of outputs, norm.outputs = true, or"),
    ],
)
def test_what_goes_with_them_is_checked(
    plan: Path, tmp_path: Path, before: str, after: str, words: str
) -> None:
    document = (plan.parent / "golden.model.toml").read_text()
    for line in ("shared_experts = 0\n", 'router = "sigmoid"\n'):
        document = document.replace(line, "")
    assert document.count(before) == 1
    (tmp_path / "golden.model.toml").write_text(document.replace(before, after))
    (tmp_path / "golden.plan.toml").write_text(plan.read_text())
    with pytest.raises(UserError, match=rf"P253.*{words}"):
        load_plan(tmp_path / "golden.plan.toml")


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
