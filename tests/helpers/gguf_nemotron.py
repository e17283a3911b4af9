"""GGUF files of Nemotron-H, as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from tests.helpers.gguf_tensors import permute, start_file, write_all


def write_nemotron(file: Path, config: dict[str, Any], weights: dict[str, F32]) -> Path:
    kinds, is_mixed = config["layers_block_type"], "moe" in config["layers_block_type"]
    name = "NEMOTRON_H_MOE" if is_mixed else "NEMOTRON_H"
    heads = config["num_key_value_heads"]
    stated = {
        "num_hidden_layers": len(kinds), "rms_norm_eps": config["layer_norm_epsilon"],
        "num_key_value_heads": [heads * (kind == "full_attention") for kind in kinds],
    }  # fmt: skip
    writer, names = start_file(file, name, config | stated)
    width = config["moe_intermediate_size" if is_mixed else "intermediate_size"]
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    if is_mixed:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])
    experts: dict[str, list[F32]] = {}
    for original, values in weights.items():
        if ".experts." in original:
            block, _, part = original.partition(".mixer.experts.")
            merged = f"{block.replace('backbone', 'model')}.mlp.experts.{part.split('.')[1]}"
            experts.setdefault(merged, []).append(values)
            continue
        changed, values = _change_tensor(config, original, values)
        found = names.get_name(changed, try_suffixes=(".weight", ".bias"))
        assert found is not None, changed
        writer.add_tensor(found, values)
    for merged, parts in experts.items():
        writer.add_tensor(f"{names.get_name(merged)}.weight", np.stack(parts))
    write_all(writer)
    return file


def _change_tensor(config: dict[str, Any], name: str, values: F32) -> tuple[str, F32]:
    end = name.rpartition("mixer.")[2]
    if end == "A_log":
        return name, -np.exp(values).reshape(-1, 1)
    if end == "D":
        return name, values.reshape(-1, 1)
    if end == "dt_bias":
        return name.replace("dt_bias", "dt.bias"), values
    if end == "norm.weight":
        return name, values.reshape(config["n_groups"], -1)
    if end == "conv1d.weight":
        return name, values[:, 0]
    if end == "gate.e_score_correction_bias":
        return name.replace("correction_bias", "correction.bias"), values
    if end in ("q_proj.weight", "k_proj.weight"):
        key = "num_attention_heads" if end[0] == "q" else "num_key_value_heads"
        return name, permute(values, config[key])
    return name, values
