"""GGUF files of Gemma 3n give the stores of the checkpoints that they were made from; tensors have
the names that the gguf package knows."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from pi2.diagnostics import UserError
from pi2.importing.gguf_gemma3n import read_shares
from pi2.importing.gguf_metadata import Metadata
from tests.helpers.gguf_files import read_checkpoint
from tests.helpers.goldens import EXACT, copy_checkpoint
from tests.unit.test_importing_gguf import convert, expect_same_weights, forget_names

gguf = pytest.importorskip("gguf")


def write_gemma3n(file: Path, checkpoint: Path) -> Path:
    """A file as llama.cpp's converter writes it."""
    config, weights = read_checkpoint(checkpoint)
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, layers)
    writer = gguf.GGUFWriter(file, "gemma3n")
    writer.add_name("Tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale(
        [NormalDist().inv_cdf(share) if share else -np.inf for share in shares]
    )
    if config["final_logit_softcapping"] != 30.0:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    for key in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", config[f"{key}_token_id"])
    streams: dict[str, list[np.ndarray]] = {}
    for name, values in weights.items():
        numbered = re.fullmatch(r"(model\.altup_\w+)\.\d+\.weight", name)
        if numbered is not None:
            streams.setdefault(f"{numbered[1]}.weight", []).append(values)
            continue
        whole = f"{name}.weight" if name.endswith("_scale") else name
        writer.add_tensor(names.get_name(whole, try_suffixes=(".weight",)), values)
    for name, matrices in streams.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.stack(matrices))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
