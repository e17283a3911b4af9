"""GGUF files of families with own tables give the checkpoints' stores and gguf's names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pi2.diagnostics import UserError
from pi2.importing.gguf_architectures import read_shares
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_decoders import Metadata
from pi2.importing.gguf_states import scale_llama3
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.new_model import describe_checkpoint
from pi2.model.blocks import find_attention
from tests.helpers.gguf_files import make_sentence_piece
from tests.helpers.gguf_gemma import write_gemma3n, write_gemma4
from tests.helpers.gguf_goldens import convert, expect_same_weights, forget_names
from tests.helpers.gguf_llama4 import FIXED, write_llama4
from tests.helpers.gguf_nemotron import write_nemotron
from tests.helpers.gguf_tensors import read_checkpoint
from tests.helpers.goldens import EXACT, change_config, copy_checkpoint


def write_file(name: str, checkpoint: Path) -> Path:
    """The checkpoint of a golden model as a file; what no file says becomes its usual value."""
    file = checkpoint.parent / "tiny.gguf"
    if name == "gemma3n":
        return write_gemma3n(file, checkpoint)
    if name.startswith("gemma4"):
        return write_gemma4(file, checkpoint)
    change_config(checkpoint, **(FIXED if name == "llama4" else {"time_step_min": 0.001}))
    config, weights = read_checkpoint(checkpoint)
    write = write_llama4 if name == "llama4" else write_nemotron
    return write(file, config, weights)


GEMMA, NEMOTRON = ("gemma3n", "gemma4", "gemma4-moe", "gemma4-e2b"), "nemotron-h"


@pytest.mark.parametrize(
    "name", [*GEMMA, "llama4", NEMOTRON, f"{NEMOTRON}-moe", f"{NEMOTRON}-latent"]
)
def test_a_file_gives_the_store_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    file = write_file(name, checkpoint)
    tokenizer = checkpoint / "tokenizer.json"
    expected = convert(checkpoint, tmp_path / "a", tokenizer, EXACT)
    found = convert(file, tmp_path / "b", tokenizer, EXACT)
    one, other = forget_names(found), forget_names(expected)
    if name.startswith("gemma4"):
        # A file states whole pairs that turn, and no share of a head.
        width, shares = find_attention(expected, 1).head_dim, []
        for values in (one, other):
            rope = values.get("other_rope") or values["rope"]
            shares.append(int(rope.pop("share") * width / 2 + 1e-6))
        assert shares[0] == shares[1]
    assert one == other
    expect_same_weights(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("value", [[0.5], ["a"] * 5, [float("nan")] * 5, [float("inf")] * 5, 1.0])
def test_cutoffs_that_are_none_are_refused(value: Any) -> None:
    values = {"general.architecture": "gemma3n", "gemma3n.activation_sparsity_scale": value}
    metadata = Metadata(Path("tiny.gguf"), values)
    with pytest.raises(UserError, match=r"P532.*activation_sparsity_scale"):
        read_shares(metadata, 5)


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


def test_a_window_of_no_tokens_means_that_all_layers_are_alike(tmp_path: Path) -> None:
    config, weights = read_checkpoint(copy_checkpoint("llama4", tmp_path / "checkpoint"))
    file = write_llama4(tmp_path / "tiny.gguf", config, weights, window=0)
    model = describe_checkpoint(file).model
    assert model.attention.sliding_window is None and model.other_rope is None
    assert model.attention.head_norm_layers is None and model.attention.growth == 0.0


@pytest.mark.parametrize("high", [1.0, 4.0])
def test_divisors_of_frequencies_tell_the_scaling_that_made_them(high: float) -> None:
    theta, width, original, factor = 500_000.0, 128, 8192, 16.0
    turns = original / (2 * np.pi * theta ** (np.arange(width // 2) * 2 / width))
    kept = np.clip((turns - 1) / (high - 1), 0, 1) if high > 1 else turns >= 1
    divisors = (1 / ((1 - kept) / factor + kept)).astype(np.float32)
    config: dict[str, Any] = {"rope_theta": theta, "head_dim": width}
    assert scale_llama3(config, divisors)
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
