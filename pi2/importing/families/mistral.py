"""Mistral, Phi, MiniMax and Ling."""

from __future__ import annotations

from pi2.importing.config import Config, read_whole_window, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_dense_layers,
    add_experts,
    add_growth,
    add_kinds,
    describe_decoder,
    list_dense_layers,
    name_plain_ffn,
)
from pi2.importing.families.deepseek import (
    add_key_decays,
    describe_deepseek_v3,
    describe_latent,
    name_delta,
    name_kimi_experts,
    rename_keys,
)


def describe_minimax_m2(config: Config) -> Tables:
    """MiniMax M2: Mixtral whose queries have one norm for all heads, as its keys."""
    head_dim = config.read("head_dim", int, 128)
    rotated = 1.0
    if config.has("rotary_dim") and head_dim > 0:
        rotated = config.read("rotary_dim", int) / head_dim
    tables = describe_decoder(config.change({"head_dim": head_dim}), rotated=rotated)
    tables["attention"] = {"head_norm": True, "head_norm_of": "all"}
    tables["moe"] = {
        "experts": config.read_first(("num_local_experts", "num_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int),
        "router": "sigmoid",
        "choice_bias": True,
    }
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.gate.weight",
        "choice_bias": f"{block}.e_score_correction_bias",
        **{
            part: f"{block}.experts.{{expert}}.{name}.weight"
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    return tables


def describe_minimax_m3(config: Config) -> Tables:
    """The text of MiniMax M3: norms that add 1, gpt-oss's FFN, and an index that chooses blocks of
    keys in some layers; contexts in which it chooses something are left out."""
    head_dim = config.read("head_dim", int, 128)
    # The code computes gpt-oss's FFN, whatever hidden_act says.
    config = config.change({"head_dim": head_dim, "hidden_act": "silu"})
    tables = describe_decoder(config, rotated=1.0)
    layers, ffn = tables["shape"]["layers"], tables["shape"]["ffn"]
    limit = config.read("swiglu_limit", float, 7.0)
    if limit <= 0:
        raise config.refuse(f"swiglu_limit is {limit}")
    shared = config.read("shared_intermediate_size", int, 3072)
    if ffn < 1 or shared < 1:
        raise config.refuse(f"intermediate_size is {ffn}, shared_intermediate_size {shared}")
    tables["norm"]["weight_offset"] = 1.0
    tables["attention"] = {"head_norm": True}
    tables["ffn"] = {
        "activation": "silu",
        "slope": config.read("swiglu_alpha", float, 1.702),
        "limit": limit,
        "up_offset": 1.0,
    }
    tables["moe"] = {
        "experts": config.read_first(("num_local_experts", "num_experts"), int),
        "active_experts": config.read("num_experts_per_tok", int, 4),
        "shared_experts": -(-shared // ffn),
        "router": "sigmoid",
        "choice_bias": True,
        "scaling": config.read("routed_scaling_factor", float, 2.0),
    }
    tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}
    dense = config.read("dense_intermediate_size", int, 12288)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, 0))
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = name_kimi_experts(block)
    tables["tensors"]["choice_bias"] = f"{block}.e_score_correction_bias"
    _limit_context(config, tables["shape"])
    return tables


def _limit_context(config: Config, shape: Tables) -> None:
    """Leave contexts out that have more blocks of keys than the index chooses, where any layer has
    one."""
    kinds, older = config.read_list("layer_types"), config.read_table("sparse_attention_config")
    chooses = (
        "minimax_m3_sparse" in kinds if kinds else any(older.read_list("sparse_attention_freq"))
    )
    if chooses:
        size, count = (
            older.read(name, int, config.read(f"index_{key}", int, default))
            for name, key, default in (
                ("sparse_block_size", "block_size", 128),
                ("sparse_topk_blocks", "topk_blocks", 16),
            )
        )
        if size < 1 or count < 1:
            raise config.refuse(f"its index chooses {count} blocks of {size} keys")
        shape["context"] = min(shape["context"], size * count)


def describe_bailing_hybrid(config: Config) -> Tables:
    """DeepSeek V3 with gates in every sixth layer, and Kimi's delta rule in the others."""
    config = rename_keys(
        config,
        {
            "max_position_embeddings": 2**18,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
            "rope_theta": 6e6,
        },
    )
    dense = config.read("intermediate_size", int)
    # Queries are projected at once, whatever else is stated.
    values = {"first_k_dense_replace": 0, "q_lora_rank": None, "rope_interleave": True}
    tables = describe_deepseek_v3(config.change(values))
    layers, group = tables["shape"]["layers"], config.read("layer_group_size", int, 6)
    add_kinds(config, tables, "delta", lambda n: group > 0 and (n + 1) % group == 0)
    heads = tables["shape"]["heads"]
    # ``head_dim`` is that of rotated parts in what transformers writes.
    size = config.read("linear_head_dim", int, config.read("head_dim", int, 128))
    add_key_decays(tables, heads, size, config.read("short_conv_kernel_size", int, 4))
    if config.read("kda_safe_gate", bool, True):
        tables["recurrence"]["decay_floor"] = config.read("kda_lower_bound", float, -5.0)
    first = config.read("first_k_dense_replace", int, 2)
    add_dense_layers(tables, dense, list_dense_layers(config, layers, first))
    tables["attention"] |= {"output_gate": True, "output_gate_of": "head"}
    block = f"{LAYER}.attention"
    tables["tensors"] |= {
        **name_delta(block, "dense"),
        "embedding": "model.word_embeddings.weight",
        "query": f"{block}.q_proj.weight",
        "query_gate": f"{block}.g_proj.weight",
        "latent": f"{block}.kv_a_proj_with_mqa.weight",
        "latent_bias": f"{block}.kv_a_proj_with_mqa.bias",
        "latent_norm": f"{block}.kv_a_layernorm.weight",
        "latent_out": f"{block}.kv_b_proj.weight",
        "output": f"{block}.dense.weight",
        "output_bias": f"{block}.dense.bias",
        "choice_bias": f"{LAYER}.mlp.gate.expert_bias",
    }
    return tables


def describe_mistral(config: Config) -> Tables:
    """Llama with a sliding window."""
    tables = describe_decoder(config)
    tables["attention"] = read_whole_window(config)
    return tables


def describe_bamboo(config: Config) -> Tables:
    """Mistral with dReLU, which its configuration calls ReLU."""
    tables = describe_mistral(config)
    tables["ffn"] = {"activation": "drelu"}
    return tables


def describe_ministral(config: Config) -> Tables:
    """Mistral whose layers with a window are listed."""
    tables = describe_decoder(config)
    window = read_window(config, tables["shape"]["layers"], lambda layer: True)
    tables["attention"] = window
    return tables


def describe_ministral3(config: Config) -> Tables:
    """Mistral whose queries grow with the position."""
    tables = describe_mistral(config)
    add_growth(config, tables)
    return tables


def describe_mixtral(config: Config) -> Tables:
    """Mistral with experts."""
    tables = describe_mistral(config)
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        "active_experts": config.read("num_experts_per_tok", int),
    }
    expert = f"{LAYER}.block_sparse_moe.experts.{{expert}}"
    tables["tensors"] = {
        "router": f"{LAYER}.block_sparse_moe.gate.weight",
        "gate": f"{expert}.w1.weight",
        "up": f"{expert}.w3.weight",
        "down": f"{expert}.w2.weight",
    }
    return tables


def describe_turbosparse_mixtral(config: Config) -> Tables:
    """Mixtral with dReLU, which its configuration calls ReLU, and a predictor in every expert."""
    tables = describe_mixtral(config)
    tables["ffn"] = {"activation": "drelu"}
    predictor = f"{LAYER}.block_sparse_moe.experts.{{expert}}.predictor"
    tables["tensors"] |= {
        "predictor_in": f"{predictor}.fc1.weight",
        "predictor_out": f"{predictor}.fc2.weight",
        "predictor_bias": f"{predictor}.bias",
    }
    return tables


_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What is meant where a configuration states no positions."""


def describe_mistral4(config: Config) -> Tables:
    """Mistral Small 4: latent attention, queries that grow, and experts that a softmax weights."""
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.change({"rope_parameters": _MISTRAL4_ROPE})
    scaling = dict(config.read_table("rope_parameters").values)
    # It is the share that qk_rope_head_dim has of a head.
    scaling.pop("partial_rotary_factor", None)
    config = config.change({"rope_parameters": scaling}).set_default("qk_nope_head_dim", 64)
    tables = describe_latent(config.set_default("kv_lora_rank", 256))
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    add_growth(config, tables)
    add_experts(config, tables)
    tables["moe"] |= {
        "normalise_weights": config.read("norm_topk_prob", bool, True),
        "groups": config.read("n_group", int, 1),
        "active_groups": config.read("topk_group", int, 1),
    }
    del tables["tensors"]["choice_bias"]
    return tables


def describe_phi(config: Config) -> Tables:
    """One norm for attention and FFN, side by side; biases everywhere, in the head too."""
    config.demand("qk_layernorm", False, False)
    tables = describe_decoder(config, rotated=0.5)
    epsilon = config.read("layer_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": True, "output_bias": True}
    tables["residual"] = "parallel"
    tables["ffn"] |= {"gated": False, "bias": True}
    tables["head_bias"] = True
    tables["tensors"] = {
        "ffn_norm": f"{LAYER}.input_layernorm.weight",
        "ffn_norm_bias": f"{LAYER}.input_layernorm.bias",
        "output": f"{LAYER}.self_attn.dense.weight",
        "output_bias": f"{LAYER}.self_attn.dense.bias",
        **name_plain_ffn(f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.fc2"),
        "final_norm": "model.final_layernorm.weight",
        "final_norm_bias": "model.final_layernorm.bias",
    }
    return tables


def describe_phi3(config: Config) -> Tables:
    """Mistral with query, key and value in one tensor, and gate and up in another."""
    tables = describe_decoder(config, rotated=1.0)
    tables["attention"] = read_whole_window(config)
    tables["tensors"] = {
        "fused_qkv": f"{LAYER}.self_attn.qkv_proj.weight",
        "fused_gate_up": f"{LAYER}.mlp.gate_up_proj.weight",
    }
    return tables


def describe_phimoe(config: Config) -> Tables:
    """Phi-3.5-MoE: LayerNorm, biases, and two experts that SparseMixer chooses."""
    tables = describe_mistral(config)
    bias = config.read("attention_bias", bool, False)
    epsilon = config.read("rms_norm_eps", float, 1e-5)
    tables["norm"] = {"kind": "layernorm", "epsilon": epsilon, "bias": True}
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, **read_whole_window(config)}
    tables["head_bias"] = config.read("lm_head_bias", bool, False)
    _read_scales(config, tables)
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        # The code takes two, whatever num_experts_per_tok says.
        "active_experts": 2,
        "router": "mixer",
        "tolerance": config.read("router_jitter_noise", float, 0.01),
    }
    block = f"{LAYER}.block_sparse_moe"
    tables["tensors"] = {
        "router": f"{block}.gate.weight",
        **{
            part: f"{block}.experts.{{expert}}.{name}.weight"
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
    return tables


def _read_scales(config: Config, tables: Tables) -> None:
    """Factors of sines and cosines, which Phi-3.5-MoE states for short and long sequences."""
    scaling = config.read_table("rope_parameters")
    if not scaling.has("short_mscale"):
        scaling = config.read_table("rope_scaling")
    if tables["rope"].get("kind") == "longrope" and scaling.has("short_mscale"):
        tables["rope"]["attention_factor"] = scaling.read("short_mscale", float)
        if scaling.has("long_mscale"):
            tables["rope"]["long_attention_factor"] = scaling.read("long_mscale", float)


FAMILIES = {
    "minimax_m2": describe_minimax_m2,
    "minimax_m3_vl_text": describe_minimax_m3,
    "bailing_hybrid": describe_bailing_hybrid,
    "bamboo": describe_bamboo,
    "ministral": describe_ministral,
    "ministral3": describe_ministral3,
    "mistral": describe_mistral,
    "mistral4": describe_mistral4,
    "mixtral": describe_mixtral,
    "turbosparsemixtral": describe_turbosparse_mixtral,
    "phi": describe_phi,
    "phi3": describe_phi3,
    "phimoe": describe_phimoe,
}
