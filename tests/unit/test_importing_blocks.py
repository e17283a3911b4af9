"""Checkpoints whose layers are single blocks, and layers with two mixers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.importing.config import Layer, describe_layers
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.goldens import EXACT, convert_golden, copy_checkpoint, make_golden_plan
from tests.helpers.tables import in_table


def test_the_blocks_of_nemotron_nano_9b_v2_are_25_layers() -> None:
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    layers = describe_layers({"hybrid_override_pattern": pattern})
    assert not isinstance(layers, str)
    assert Counter(layer.mixers for layer in layers) == {
        ("mamba",): 19,
        ("mamba", "attention"): 4,
        ("mamba", "mamba"): 2,
    }


@in_table
def test_any_order_of_blocks_is_some_layers(pattern: str, expected: list[list[Any]]) -> None:
    assert describe_layers({"hybrid_override_pattern": pattern}) == [
        Layer(tuple(mixers), *own) for mixers, *own in expected
    ]


@in_table
def test_other_blocks_are_refused(tmp_path: Path, pattern: object, words: str) -> None:
    checkpoint = copy_checkpoint("nemotron-h", tmp_path / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    del config["layers_block_type"]
    config["hybrid_override_pattern"] = pattern
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"P544.*{words}"):
        describe_checkpoint(checkpoint, "golden")


def test_a_tensor_that_is_missing_has_its_name_in_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("nemotron-h", tmp_path / "checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    del weights["backbone.layers.3.mixer.k_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=r"P533.*'backbone\.layers\.3\.mixer\.k_proj\.weight'"):
        convert_golden(checkpoint, tmp_path, EXACT)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("nemotron-h", tmp_path_factory.mktemp("double"))


def test_a_layer_with_two_mixers_keeps_a_state_and_keys_and_values(plan: Path) -> None:
    resolved = load_plan(plan)
    model, needs = resolved.model, resolved.needs
    assert model.layers is not None
    assert model.layers.kinds == ("mamba", "mamba+attention", "attention")
    assert model.state_layers == (0, 1)
    assert [block.attention is not None for block in model.blocks] == [False, True, True]
    assert "2 states" in needs.state.explanation and "2 layers" in needs.kv.explanation


def test_names_of_two_states_in_a_layer_have_the_number_of_the_mixer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copy_checkpoint("nemotron-h-moe", tmp_path / "checkpoint")
    text = describe_checkpoint(checkpoint, "golden").text
    document = tmp_path / "golden.model.toml"
    document.write_text(text.replace("mamba.{mixer}.in_proj.weight", "mamba.in_proj.weight"))
    assert run(["validate", str(document)]) == 1
    written = "".join(capsys.readouterr())
    assert written.count("error[P247]") == 1
    assert "error[P247]: the name of state_in is the same for every mixer" in written


def test_a_run_of_such_a_model_is_simulated(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("--set", "device=oneplus-12", "--set", "bundle.stride=4 KiB")
    assert run(["simulate", str(plan), "--prompt", "8", "--tokens", "8", *changes]) == 0
    assert capsys.readouterr().out.startswith("SIMULATED, not measured")
