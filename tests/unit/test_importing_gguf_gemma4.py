"""GGUF files of Gemma 4 give the stores of the checkpoints that they were made from; tensors have
the names that the gguf package knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pi2.diagnostics import UserError
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.model.blocks import find_attention
from tests.helpers.gguf_files import make_sentence_piece
from tests.helpers.gguf_gemma import write_gemma4
from tests.helpers.gguf_goldens import convert, expect_same_weights, forget_names
from tests.helpers.goldens import EXACT, copy_checkpoint

GOLDENS = ("gemma4", "gemma4-moe", "gemma4-e2b")


@pytest.mark.parametrize("name", GOLDENS)
def test_a_file_gives_the_store_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    file = write_gemma4(tmp_path / "tiny.gguf", checkpoint)
    tokenizer = checkpoint / "tokenizer.json"
    expected = convert(checkpoint, tmp_path / "a", tokenizer, EXACT)
    found = convert(file, tmp_path / "b", tokenizer, EXACT)
    one, other = forget_names(found), forget_names(expected)
    # A file states whole pairs that turn, and no share of a head.
    width, shares = find_attention(expected, 1).head_dim, []
    for values in (one, other):
        rope = values.get("other_rope") or values["rope"]
        shares.append(int(rope.pop("share") * width / 2 + 1e-6))
    assert shares[0] == shares[1]
    assert one == other
    expect_same_weights(tmp_path / "a", tmp_path / "b")


def test_pairs_that_turn_in_another_way_are_refused(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma4-e2b", tmp_path / "checkpoint")
    file = write_gemma4(tmp_path / "tiny.gguf", checkpoint, {1: 8.0})
    with pytest.raises(UserError, match="P544") as caught:
        open_gguf(file)
    assert "scales positions in a way that is unknown" in str(caught.value)


def test_pieces_are_merged_in_the_order_of_the_file() -> None:
    scored = make_sentence_piece() | {"tokenizer.ggml.add_space_prefix": False}
    original = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), scored))
    merges = json.loads(original.to_str())["model"]["merges"]
    listed = scored | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_bos_token": True,
    }
    del listed["tokenizer.ggml.scores"]
    made = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), listed))
    for text in ("hello world", "  two  spaces", "naïve café ☃ 😀", "a\nb\tc"):
        assert made.encode(text).ids == original.encode(text).ids
        assert made.decode(made.encode(text).ids) == text
