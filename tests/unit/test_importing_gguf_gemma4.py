"""GGUF files of Gemma 4 give the stores of the checkpoints that they were made from; tensors have
the names that the gguf package knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pi2.diagnostics import UserError
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_tokenizer import make_tokenizer
from tests.helpers.gguf_files import make_sentence_piece, read_checkpoint
from tests.helpers.goldens import EXACT, copy_checkpoint
from tests.unit.test_importing_gguf import convert, expect_same_weights, forget_names

gguf = pytest.importorskip("gguf")
GOLDENS = ("gemma4", "gemma4-moe", "gemma4-e2b")


def write_gemma4(file: Path, checkpoint: Path, divisors: Mapping[int, float] | None = None) -> Path:
    """A file as llama.cpp's converter writes it; ``divisors`` of frequencies replace its own."""
    config, weights = read_checkpoint(checkpoint)
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)
    writer = gguf.GGUFWriter(file, "gemma4")
    writer.add_name("Tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    shared = config["num_kv_shared_layers"]
    first, ffn = layers - shared, config["intermediate_size"]
    is_wide = config["use_double_wide_mlp"]
    sizes = [ffn * (1 + (is_wide and layer >= first)) for layer in range(layers)]
    writer.add_feed_forward_length(sizes if is_wide else ffn)
    writer.add_head_count(config["num_attention_heads"])
    heads, own = config["per_layer_config"], config["num_key_value_heads"]
    full = next(iter(heads.values()))
    kv_heads = [heads.get(str(n), {}).get("num_key_value_heads", own) for n in range(layers)]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else own)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    turning = int(full["head_dim"] * ropes["full_attention"]["partial_rotary_factor"] / 2)
    found = np.full(full["head_dim"] // 2, 1e30, np.float32)
    found[:turning] = 1.0
    for place, divisor in (divisors or {}).items():
        found[place] = divisor
    writer.add_tensor("rope_freqs.weight", found)
    for key in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", config[f"{key}_token_id"])
    for name, values in weights.items():
        writer.add_tensor(name_tensor(names, name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def name_tensor(names: Any, name: str) -> str:
    """The file's name of a tensor, which has ends of its own for some."""
    if name.endswith("router.scale"):
        return f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
    found: str = names.get_name(name, try_suffixes=(".weight",))
    return found if found.endswith(".weight") else f"{found}.weight"


@pytest.mark.parametrize("name", GOLDENS)
def test_a_file_gives_the_store_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    file = write_gemma4(tmp_path / "tiny.gguf", checkpoint)
    tokenizer = checkpoint / "tokenizer.json"
    expected = convert(checkpoint, tmp_path / "a", tokenizer, EXACT)
    found = convert(file, tmp_path / "b", tokenizer, EXACT)
    one, other = forget_names(found), forget_names(expected)
    # A file states whole pairs that turn, and no share of a head.
    width, shares = expected.view_layer(1).shape.head_dim, []
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
