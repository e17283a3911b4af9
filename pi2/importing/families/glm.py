"""GLM 4 to 5: dense, with experts, and with latent attention."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.deepseek import describe_indexed, describe_with_dense_layers
from pi2.importing.families.experts import add_experts, add_sigmoids


def describe_glm(config: Config) -> Tables:
    """A decoder that rotates half of each head, two neighbours at a time."""
    tables = describe_decoder(config, rotated=0.5)
    tables["attention"] = {"qkv_bias": config.read("attention_bias", bool, False)}
    tables["rope"]["pairs"] = "neighbours"
    tables["tensors"] = {"fused_gate_up": f"{LAYER}.mlp.gate_up_proj.weight"}
    return tables


def describe_glm4(config: Config) -> Tables:
    """GLM with norms of outputs."""
    tables = describe_glm(config)
    tables["norm"]["outputs"] = True
    tables["tensors"] |= {
        "attention_output_norm": f"{LAYER}.post_self_attn_layernorm.weight",
        "ffn_output_norm": f"{LAYER}.post_mlp_layernorm.weight",
    }
    return tables


def describe_glm4v(config: Config) -> Tables:
    """The text of GLM-4V: GLM 4, whose queries, keys and values have biases whatever it says."""
    return describe_glm4(config.change({"attention_bias": True}))


def describe_glm4_moe(config: Config) -> Tables:
    """GLM 4.5: half of each head is rotated."""
    tables = describe_glm(config)
    tables["rope"]["pairs"] = "halves"
    tables["attention"]["head_norm"] = config.read("use_qk_norm", bool, False)
    tables["tensors"] = {}
    add_experts(config, tables)
    add_sigmoids(config, tables, 1, 1)
    return tables


def describe_glm4_moe_lite(config: Config) -> Tables:
    """GLM 4.7 Flash: DeepSeek V3 with a list of layers that are no mixture."""
    config = config.set_default("n_group", 1).set_default("topk_group", 1)
    # The older name of the list is the number of such layers at the beginning.
    first = config.read("first_k_dense_replace", int, 1)
    tables = describe_with_dense_layers(config, first)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


def describe_glm_moe_dsa(config: Config) -> Tables:
    """GLM 5: the same with other sizes, and an index for several layers."""
    tables = describe_indexed(config, 1, 1)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    return tables


FAMILIES = {
    "glm": describe_glm,
    "glm4": describe_glm4,
    "glm4_moe": describe_glm4_moe,
    "glm4v_moe_text": describe_glm4_moe,
    "glm4v_text": describe_glm4v,
    "glm4_moe_lite": describe_glm4_moe_lite,
    "glm_moe_dsa": describe_glm_moe_dsa,
}
