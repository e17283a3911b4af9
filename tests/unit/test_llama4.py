"""Llama 4: attention in chunks, layers without positions, experts that read what is weighed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pi2.backends.arithmetic import compute_growth, compute_rope_tables
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.importing.config import Config
from pi2.importing.families import describe_family
from pi2.importing.new_model import describe_checkpoint
from pi2.model.blocks import find_attention
from pi2.plan.documents.model_mixing import Rope
from tests.helpers.goldens import FOLDER, copy_checkpoint, make_golden_plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("llama4", tmp_path_factory.mktemp("llama4"))


def describe(**options: Any) -> dict[str, Any]:
    """Tables of the golden model with other options."""
    values = json.loads((FOLDER / "llama4/config.json").read_text())
    return describe_family(Config(Path("config.json"), {**values, **options}))


def test_layers_have_chunks_and_norms_or_growing_queries(plan: Path) -> None:
    model = load_plan(plan).model
    attention = [find_attention(model, layer) for layer in range(5)]
    assert [own.window for own in attention] == [7, 7, None, 7, None]
    assert [own.head_norm for own in attention] == [True, True, False, True, False]
    assert [own.rope.kind == "none" for own in attention] == [0, 0, 1, 0, 1]
    kinds = [block.ffn.kind for block in model.blocks]
    assert kinds == ["dense", "experts", "dense", "experts", "dense"]
    assert compute_growth(model, 0, 0, 64).tolist() == [1.0] * 64
    grown = compute_growth(model, 2, 0, 64)
    assert np.flatnonzero(np.diff(grown)).tolist() == list(range(3, 63, 5))
    assert grown[3] == 1.0 and grown[4] == pytest.approx(1 + 0.7 * np.log(2))


def test_options_that_are_left_out_are_the_familys() -> None:
    left_out = dict.fromkeys(("no_rope_layers", "layer_types", "moe_layers"))
    tables = describe(**left_out, num_hidden_layers=8, interleave_moe_layer_step=1)
    assert tables["other_rope"] == {"kind": "none", "layers": [3, 7]}
    assert tables["attention"]["growth_layers"] == [3, 7]
    assert tables["attention"]["window_layers"] == [0, 1, 2, 4, 5, 6]
    assert "dense_layers" not in tables["moe"]
    assert describe(attn_temperature_tuning=4) == describe(attn_temperature_tuning=True)
    whole = describe(attention_chunk_size=None, attn_temperature_tuning=False, use_qk_norm=False)
    assert whole["attention"] == {"qkv_bias": False, "output_bias": False}


def test_the_text_part_of_a_model_of_pictures_is_taken(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("llama4", tmp_path / "checkpoint")
    expected = describe_checkpoint(checkpoint).model
    text = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps({"model_type": "llama4", "text_config": text, "vision_config": {}})
    )
    weights = load_file(checkpoint / "model.safetensors")
    renamed = {f"language_model.{name}": values for name, values in weights.items()}
    save_file(renamed, checkpoint / "model.safetensors")
    found = describe_checkpoint(checkpoint).model
    assert found.tensors.router.startswith("language_model.model.layers")
    assert found.model_copy(update={"tensors": expected.tensors}) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"decode.predictor": "gate"},
        {"decode.predictor": "router", "sparsity": {"method": "cats", "target": 0.5}},
    ],
)
def test_single_neurons_of_weighed_experts_are_not_named(
    plan: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"P268.*depends on the expert's weight"):
        load_plan(plan, overrides=changes)


def test_nothing_is_between_two_factors_that_are_equal() -> None:
    """Llama 4 states 1 for both; wavelengths from the original context on are divided."""
    scaled = Rope(kind="llama3", theta=100.0, factor=16.0, original_context=16).model_copy(
        update={"low_frequency_factor": 1.0, "high_frequency_factor": 1.0}
    )
    frequencies = 100.0 ** -(np.arange(0, 8, 2) / 8)
    divided = np.where(2 * np.pi / frequencies > 16, frequencies / 16, frequencies)
    expected = np.cos(np.outer(np.arange(32), divided)).astype(np.float32)
    np.testing.assert_allclose(compute_rope_tables(scaled, 8, 32)[0], expected, atol=1e-6)
