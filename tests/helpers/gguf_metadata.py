"""What llama.cpp's converter writes of a configuration into a GGUF file."""

from collections.abc import Mapping
from typing import Any

import pytest

_KIMI = {
    "model_max_length": "max_position_embeddings", "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
}  # fmt: skip
"""What others call the keys of Kimi and Ling."""
_LISTED = ("lfm2", "granitemoehybrid", "kimi_linear", "bailing_hybrid")
"""Names of families whose files state keys and values of each layer."""
_INDEX = {
    "index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k",
    "index_topk_blocks": "top_k", "index_block_size": "block_size",
    "index_local_blocks": "local_blocks",
}  # fmt: skip
"""Names of an index's sizes in configurations and in files."""


def add_config(writer: Any, config: Mapping[str, Any]) -> None:
    if "num_experts_per_token" in config:
        config = {**config, **{new: config[old] for old, new in _KIMI.items()}}
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_uint32(f"{writer.arch}.kda.head_dim", config["linear_head_dim"])
    if "kda_lower_bound" in config:
        writer.add_bool(f"{writer.arch}.kda.safe_gate", True)
        writer.add_float32(f"{writer.arch}.kda.gate_lower_bound", config["kda_lower_bound"])
    for key, name in _INDEX.items():
        if key in config:
            writer.add_uint32(f"{writer.arch}.attention.indexer.{name}", config[key])
    if "indexer_types" in config:
        flags = [int(own == "full") for own in config["indexer_types"]]
        writer.add_array(f"{writer.arch}.attention.indexer.types", flags)
    if "mlp_layer_types" in config:
        config = {**config, "first_k_dense_replace": config["mlp_layer_types"].count("dense")}
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_name("Tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    keys = ["dense_intermediate_size", "intermediate_size", "ffn_dim", "ffn_hidden_size"]
    keys.append("moe_intermediate_size")
    if config.get("num_local_experts") == 0:
        keys = ["shared_intermediate_size"]
    sizes = (config.get(key) for key in keys)
    writer.add_feed_forward_length(next(size for size in sizes if size))
    if "linear_num_key_heads" in config:
        heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        if config["model_type"].startswith("qwen3_5"):
            # A third of the pairs is turned by time, height and width each: in texts all the same.
            pairs = int(scaling["partial_rotary_factor"] * head_dim) // 2
            writer.add_rope_dimension_sections([pairs - pairs // 3 * 2, pairs // 3, pairs // 3, 0])
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_head_count(heads)
    kv_heads = config.get("num_key_value_heads") or heads
    if config["model_type"] == "falcon":
        kv_heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    if config["model_type"].startswith(_LISTED):
        kv_heads = 1 if "kv_lora_rank" in config else kv_heads
        kinds = config["layer_types"]
        writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in kinds])
    else:
        writer.add_head_count_kv(1 if "kv_lora_rank" in config else kv_heads)
    if "kv_lora_rank" in config:
        add_latent(writer, config)
    elif head_dim != hidden // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rms_norm_eps" in config or config["model_type"].startswith("lfm2"):
        config = {"rms_norm_eps": config.get("norm_eps"), **config}
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        names = ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
        stated = (config[key] for key in names if config.get(key))
        writer.add_layer_norm_eps(next(stated, 1e-5))
    if "full_attention" in scaling:
        writer.add_float32(
            f"{writer.arch}.rope.freq_base_swa", scaling["sliding_attention"]["rope_theta"]
        )
        scaling = scaling["full_attention"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            writer.add_float32(f"{writer.arch}.{key}", config[key])
    if config.get("sliding_window_pattern"):
        pattern = config["sliding_window_pattern"]
        writer.add_uint32(f"{writer.arch}.attention.sliding_window_pattern", pattern)
    for key in ("num_dense_layers", "first_k_dense_replace", "moe_layer_start_index"):
        if key in config:
            writer.add_leading_dense_block_count(config[key])
    if config["model_type"] in ("gpt_oss", "minimax_m2", "minimax_m3_vl_text", "hunyuan_v1_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"].startswith("cohere"):
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] == "olmo3":
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    add_routing(writer, config)
    if config["model_type"].startswith("granite"):
        add_factors(writer, config)
    if config["model_type"] == "granitemoehybrid":
        add_mamba(writer, config)
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    theta = scaling.get("rope_theta") or config.get("rope_theta")
    if theta:
        writer.add_rope_freq_base(theta)
    share = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    turned = config.get("qk_rope_head_dim") or int(share * head_dim)
    writer.add_rope_dimension_count(turned)
    kind = scaling.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(scaling["attention_factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "mscale_all_dim" in scaling:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    for key in ("beta_fast", "beta_slow"):
        if key in scaling:
            writer.add_float32(f"{writer.arch}.rope.scaling.yarn_{key}", scaling[key])
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((config[name] for name in names if config.get(name)), 0)
    if experts:
        chosen = ("num_experts_per_tok", "moe_topk", "moe_k")
        writer.add_expert_count(experts)
        writer.add_expert_used_count(next(config[name] for name in chosen if name in config))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    for key in ("bos", "eos"):
        number = config.get(f"{key}_token_id")
        if number is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)


_SIGMOID = ("deepseek_v3", "dots1", "glm", "kimi", "bailing", "lfm2_moe", "minimax")


def add_routing(writer: Any, config: Mapping[str, Any]) -> None:
    """What the mixtures state that route as DeepSeek's do."""
    family = config["model_type"]
    for name in ("n_shared_experts", "moe_num_shared_experts"):
        if config.get(name):
            writer.add_expert_shared_count(config[name])
    if family == "hunyuan_v1_moe":
        writer.add_expert_shared_count(1)
    if family == "ernie4_5_moe":
        # llama.cpp asks whether it is there, and for nothing else.
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"])
    if "moe_layer_interval" in config:
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if family.startswith(_SIGMOID):
        writer.add_expert_gating_func(pytest.importorskip("gguf").ExpertGatingFuncType.SIGMOID)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if "n_routed_experts" in config:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        # The code of DeepSeek V2 takes no word on it.
        if family != "kimi_linear":
            writer.add_expert_weights_norm(config["norm_topk_prob"] and family != "deepseek_v2")
    if family == "minimax_m3_vl_text":
        writer.add_expert_shared_count(
            -(-config["shared_intermediate_size"] // config["intermediate_size"])
        )
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(True)
    if family == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def add_latent(writer: Any, config: Mapping[str, Any]) -> None:
    """Sizes of latent attention, with one key and value for all heads, but in older files, which
    have keys and values of every head."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    key, value = config["qk_nope_head_dim"] + turned, config["v_head_dim"]
    if config.get("has_whole_keys"):
        writer.add_key_length(key)
        writer.add_value_length(value)
        return
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(key)
    writer.add_value_length_mla(value)


def add_factors(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def add_mamba(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if config["num_local_experts"]:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
