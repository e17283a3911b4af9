"""GGUF files of Nemotron-H give the stores of the checkpoints that they were made from; tensors
have the names that the gguf package knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.gguf_goldens import convert, expect_same_weights, forget_names
from tests.helpers.gguf_nemotron import write_nemotron
from tests.helpers.gguf_tensors import read_checkpoint
from tests.helpers.goldens import EXACT, copy_checkpoint


@pytest.mark.parametrize("name", ["nemotron-h", "nemotron-h-moe", "nemotron-h-latent"])
def test_a_file_gives_the_store_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    config, weights = read_checkpoint(checkpoint)
    # A file has no word for it.
    config["time_step_min"] = 0.001
    (checkpoint / "config.json").write_text(json.dumps(config))
    file = write_nemotron(tmp_path / "tiny.gguf", config, weights)
    tokenizer = checkpoint / "tokenizer.json"
    expected = convert(checkpoint, tmp_path / "a", tokenizer, EXACT)
    found = convert(file, tmp_path / "b", tokenizer, EXACT)
    assert forget_names(found) == forget_names(expected)
    expect_same_weights(tmp_path / "a", tmp_path / "b")
