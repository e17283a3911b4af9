"""Delta rules whose decays are of keys, and gates of heads of latent attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.cli.main import run
from pi2.importing.new_model import describe_checkpoint
from pi2.model.states import describe_state
from tests.helpers.goldens import (
    EXACT,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    read_golden,
    write_plan,
)


@pytest.mark.parametrize(
    ("name", "before", "after", "problem"),
    [
        ("kimi-linear", "key_heads = 3", "key_heads = 1", "as many key heads as value heads"),
        ("kimi-linear", 'decay_of = "key"', 'decay_of = "head"', "are of decays of keys"),
        ("bailing-hybrid", 'decay_of = "key"', 'decay_of = "head"', "are of decays of keys"),
        (
            "bailing-hybrid",
            'output_gate_of = "head"',
            'output_gate_of = "element"',
            "a gate for each head",
        ),
    ],
)
def test_what_does_not_belong_together_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    before: str,
    after: str,
    problem: str,
) -> None:
    text = describe_checkpoint(copy_checkpoint(name, tmp_path / "checkpoint"), "golden").text
    assert text.count(before) == 1
    (tmp_path / "golden.model.toml").write_text(text.replace(before, after))
    assert run(["validate", str(tmp_path / "golden.model.toml")]) == 1
    assert problem in "".join(capsys.readouterr())


def test_other_recurrences_have_no_decays_of_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = describe_checkpoint(copy_checkpoint("mamba", tmp_path / "checkpoint"), "golden").text
    changed = text.replace("[recurrence]\n", '[recurrence]\ngate = "sigmoid"\n')
    (tmp_path / "golden.model.toml").write_text(changed)
    assert run(["validate", str(tmp_path / "golden.model.toml")]) == 1
    assert "layers of the kind mamba1 have no decays of keys" in "".join(capsys.readouterr())


def test_ranks_are_rows_of_the_gates() -> None:
    """Kimi Linear: input gates of 3 heads, what decays and gates are made of; Ling 3: decays."""
    folder = Path(__file__).parents[1] / "golden" / "models"
    for name, gates, rows in (("kimi-linear", 3 + 12 + 12, 3 * 36), ("bailing-hybrid", 44, 160)):
        shape = describe_state(describe_checkpoint(folder / name, "golden").model)
        assert shape is not None
        assert (shape.gates, shape.rows) == (gates, rows)


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
