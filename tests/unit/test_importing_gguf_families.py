"""GGUF files of families that state more than others: refusals, scalings, and pieces."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pi2.diagnostics import UserError
from pi2.importing.gguf_architectures import Scope, find_architecture, scale_llama3
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.rows import make_same
from tests.helpers.gguf_files import make_sentence_piece
from tests.helpers.peers import read_models, write_tiny

MODELS = read_models()


@pytest.mark.parametrize("value", [[0.5], ["a"] * 5, [float("nan")] * 5, [float("inf")] * 5])
def test_cutoffs_that_are_none_are_refused(value: Any) -> None:
    family = find_architecture("gemma3n")
    values = {"general.architecture": "gemma3n", "gemma3n.activation_sparsity_scale": value}
    metadata = Metadata(Path("tiny.gguf"), values)
    scope = Scope(metadata, {"num_hidden_layers": 5}, {}, "")
    key = "activation_sparsity_pattern"
    with pytest.raises(UserError, match=r"P532"):
        scope.state({key: family.keys[key]})


def test_what_tables_of_a_family_make_of_a_file() -> None:
    values = {"general.architecture": "x", "x.wide": np.array([3, 3], np.int32), "x.name": "a"}
    metadata = Metadata(Path("a.gguf"), values)
    names = ("model.layers.1.up.weight", "model.layers.0.down.weight")
    tensors = {name: make_same(7, number=1.0) for name in names}
    scope = Scope(metadata, {"num_hidden_layers": 2, "t": {}}, tensors, "model.layers.{layer}")
    scope.state(
        {
            "t.width": ["wide"],
            "absent.width": ["wide"],
            "default": ["narrow", "= config.t.width + 1"],
            "kinds": ["= each('up' if has('.up.weight', layer) else 'down')"],
            "both": ["= [has('.up.weight'), has('.gate.weight'), rows('.down.weight')]"],
            "listed": ["= first(none, listed('wide'))"],
            "share": ["= [share_below(0.0), rounded(0.12345678), most(1, 2)]"],
        }
    )
    assert scope.config == {
        "num_hidden_layers": 2,
        "t": {"width": 3},
        "default": 4,
        "kinds": ["down", "up"],
        "both": [True, False, 7],
        "listed": [3, 3],
        "share": [0.5, 0.123457, 2],
    }
    for own in (["= count(0)"], ["= count(wide, 2)"], ["= unknown(1)"], ["missing"], ["name", 1]):
        with pytest.raises(UserError, match="P532"):
            scope.state({"one": own})


def test_pairs_that_turn_in_another_way_are_refused(tmp_path: Path) -> None:
    own = MODELS["gemma4-e2b"]
    shape, first, _, *others = own.tensors["rope_freqs.weight"]
    divisors = {"rope_freqs.weight": [shape, first, 8.0, *others]}
    file = write_tiny(tmp_path / "tiny.gguf", replace(own, tensors={**own.tensors, **divisors}))
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
    own = MODELS["llama4"]
    settings = {**own.settings, ".attention.sliding_window": 0}
    file = write_tiny(tmp_path / "tiny.gguf", replace(own, settings=settings))
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
