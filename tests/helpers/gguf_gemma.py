"""GGUF files of Gemma 3n and 4, as llama.cpp's converter writes them."""

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.helpers.gguf_tensors import read_checkpoint, start_file, write_all


def write_gemma3n(file: Path, checkpoint: Path) -> Path:
    config, weights = read_checkpoint(checkpoint)
    kinds = config["layer_types"]
    writer, names = start_file(file, "GEMMA3N", config)
    writer.add_feed_forward_length(config["intermediate_size"])
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
    write_all(writer)
    return file


def write_gemma4(file: Path, checkpoint: Path, divisors: Mapping[int, float] | None = None) -> Path:
    """A file of Gemma 4 as llama.cpp's converter writes it; ``divisors`` of frequencies."""
    config, weights = read_checkpoint(checkpoint)
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    heads, own = config["per_layer_config"], config["num_key_value_heads"]
    full = next(iter(heads.values()))
    kv_heads = [heads.get(str(n), {}).get("num_key_value_heads", own) for n in range(layers)]
    stated = {
        "head_dim": full["head_dim"],
        "num_key_value_heads": kv_heads if len(set(kv_heads)) > 1 else own,
    }
    writer, names = start_file(file, "GEMMA4", config | stated)
    shared = config["num_kv_shared_layers"]
    first, ffn = layers - shared, config["intermediate_size"]
    is_wide = config["use_double_wide_mlp"]
    sizes = [ffn * (1 + (is_wide and layer >= first)) for layer in range(layers)]
    writer.add_feed_forward_length(sizes if is_wide else ffn)
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
    for name, values in weights.items():
        writer.add_tensor(_name_tensor(names, name), values)
    write_all(writer)
    return file


def _name_tensor(names: Any, name: str) -> str:
    """The file's name of a tensor, which has ends of its own for some."""
    if name.endswith("router.scale"):
        return f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
    found: str = names.get_name(name, try_suffixes=(".weight",))
    return found if found.endswith(".weight") else f"{found}.weight"
