"""GGUF files of Gemma 3n give the stores of the checkpoints that they were made from; tensors have
the names that the gguf package knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pi2.diagnostics import UserError
from pi2.importing.gguf_decoders import Metadata
from pi2.importing.gguf_families import read_shares
from tests.helpers.gguf_gemma import write_gemma3n
from tests.helpers.gguf_goldens import convert, expect_same_weights, forget_names
from tests.helpers.goldens import EXACT, copy_checkpoint


def test_a_file_gives_the_store_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma3n", tmp_path / "checkpoint")
    file = write_gemma3n(tmp_path / "tiny.gguf", checkpoint)
    tokenizer = checkpoint / "tokenizer.json"
    expected = convert(checkpoint, tmp_path / "a", tokenizer, EXACT)
    found = convert(file, tmp_path / "b", tokenizer, EXACT)
    assert forget_names(found) == forget_names(expected)
    expect_same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("value", [[0.5], ["a"] * 5, [float("nan")] * 5, [float("inf")] * 5, 1.0])
def test_cutoffs_that_are_none_are_refused(value: Any) -> None:
    values = {"general.architecture": "gemma3n", "gemma3n.activation_sparsity_scale": value}
    metadata = Metadata(Path("tiny.gguf"), values)
    with pytest.raises(UserError, match=r"P532.*activation_sparsity_scale"):
        read_shares(metadata, 5)
