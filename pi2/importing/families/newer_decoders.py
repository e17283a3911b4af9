"""Decoders of 2025 and after: OLMo 2 and 3, Seed-OSS, Ministral 3, Hunyuan, and those with the
square of ReLU, Nemotron, Arcee and BitNet."""

from __future__ import annotations

from pi2.importing.config import (
    SPLIT_EXPERTS,
    Config,
    read_activation,
    read_rope,
    read_window,
)
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    add_growth,
    add_turns,
    describe_decoder,
    describe_granite,
    describe_llama,
    describe_mistral,
    has_cycle,
)


def describe_bitnet(config: Config) -> Tables:
    """Llama with the square of ReLU, and norms before the projections back."""
    tables = describe_llama(config)
    tables["norm"] = {"epsilon": config.read("rms_norm_eps", float, 1e-5)}
    tables["rope"] = read_rope(config, tables["shape"]["context"], theta=500_000.0)
    tables["attention"]["sub_norm"] = True
    tables["ffn"]["sub_norm"] = True
    return tables


def describe_olmo2(config: Config) -> Tables:
    """Llama whose norms come after attention and FFN, and norms of all heads together."""
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"] = {
        "epsilon": config.read("rms_norm_eps", float, 1e-5),
        "inputs": False,
        "outputs": True,
    }
    tables["attention"] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "head_norm": True,
        "head_norm_of": "all",
    }
    return tables


def describe_olmo3(config: Config) -> Tables:
    """OLMo 2 with a window in three layers of four, whose positions are not scaled."""
    tables = describe_olmo2(config)
    layers = tables["shape"]["layers"]
    tables["attention"] |= read_window(config, layers, has_cycle(4), width=4096)
    theta = config.read("rope_theta", float, 500_000.0)
    both = config.read_table("rope_parameters")
    full, local = both.read_table("full_attention"), both.read_table("sliding_attention")
    if not both.has("full_attention") and not both.has("sliding_attention"):
        full = both if both.has("rope_type") else config.read_table("rope_scaling")
    # The original code looks for it outside of the two tables.
    full = full.change({"truncate": both.read("truncate", bool, True)})
    full, local = (table.set_default("rope_theta", theta) for table in (full, local))
    add_turns(config, tables, full, local)
    return tables


def describe_seed_oss(config: Config) -> Tables:
    """Llama with two keys for biases of attention."""
    tables = describe_llama(config)
    tables["attention"] = {
        "qkv_bias": config.read("attention_bias", bool, True),
        "output_bias": config.read("attention_out_bias", bool, False),
    }
    return tables


def describe_ministral3(config: Config) -> Tables:
    """Mistral whose queries grow with the position."""
    tables = describe_mistral(config)
    add_growth(config, tables)
    return tables


def describe_hunyuan(config: Config) -> Tables:
    """Llama with norms of heads after they are rotated."""
    tables = describe_llama(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    # The code has no biases in the FFN, whatever the configuration says.
    tables["ffn"]["bias"] = False
    tables["attention"] |= {"head_norm": True, "head_norm_place": "after"}
    names = {"query_norm": "query_layernorm", "key_norm": "key_layernorm"}
    tables["tensors"] = {key: f"{LAYER}.self_attn.{name}.weight" for key, name in names.items()}
    scaling = config.read_table("rope_parameters")
    if not scaling.has("rope_type") and not scaling.has("rope_theta"):
        scaling = config.read_table("rope_scaling")
    alpha, size = scaling.read("alpha", float, 0.0), tables["shape"]["head_dim"]
    kind = scaling.read("rope_type", str, scaling.read("type", str, "default"))
    if kind == "dynamic" and alpha > 0 and size > 2:
        tables["rope"]["theta"] *= alpha ** (size / (size - 2))
    return tables


def describe_hunyuan_moe(config: Config) -> Tables:
    """Hunyuan with experts, and a shared one of the same size."""
    tables = describe_hunyuan(config)
    experts, active = (
        _read_same(config, names)
        for names in (("num_experts", "num_local_experts"), ("moe_topk", "num_experts_per_tok"))
    )
    tables["moe"] = {"experts": experts, "active_experts": active, "shared_experts": 1}
    parts = ("gate", "up", "down")
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.gate.wg.weight",
        **{part: f"{LAYER}.mlp.experts.{{expert}}.{part}_proj.weight" for part in parts},
        **{f"shared_{part}": f"{LAYER}.mlp.shared_mlp.{part}_proj.weight" for part in parts},
    }
    return tables


def _read_same(config: Config, names: tuple[str, ...]) -> int:
    """A number that may be stated for every layer, where all of them are the same."""
    found = next((config.read_list(name) for name in names if config.has(name)), [1])
    if len(set(map(str, found))) != 1 or type(found[0]) is not int:
        raise config.refuse(f"{names[0]} is not the same number in every layer")
    number: int = found[0]
    return number


def describe_nemotron(config: Config) -> Tables:
    """LayerNorm that is stored less 1, and an FFN without gates."""
    tables = describe_decoder(config, rotated=0.5)
    bias = config.read("attention_bias", bool, False)
    tables["norm"] = {
        "kind": "layernorm",
        "epsilon": config.read("norm_eps", float, 1e-5),
        "bias": True,
        "weight_offset": 1.0,
    }
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias}
    tables["ffn"] |= {"gated": False, "bias": config.read("mlp_bias", bool, False)}
    return tables


def describe_arcee(config: Config) -> Tables:
    """Llama without gates."""
    values = {} if config.has("hidden_act") else {"hidden_act": "relu2"}
    tables = describe_llama(config.change(values))
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["ffn"]["gated"] = False
    return tables


def describe_granite_moe(config: Config) -> Tables:
    """Granite with experts, whose matrices are in one tensor; shared ones, too."""
    tables = describe_granite(config)
    tables["ffn"] = {"activation": read_activation(config, "hidden_act")}
    tables["moe"] = {
        "experts": config.read("num_local_experts", int),
        "active_experts": config.read("num_experts_per_tok", int),
    }
    ffn, shared = tables["shape"]["ffn"], config.read("shared_intermediate_size", int, 0)
    if shared and ffn > 0:
        count = -(-shared // ffn)
        tables["moe"] |= {"shared_experts": count}
        tables["moe"] |= {"shared_ffn": shared} if shared % ffn else {}
    tables["tensors"] = name_granite_experts(config)
    return tables


def name_granite_experts(config: Config) -> Tables:
    """Names of Granite's router, experts and shared experts."""
    block, shared = f"{LAYER}.block_sparse_moe", f"{LAYER}.shared_mlp"
    names = {"router": f"{block}.router.layer.weight"}
    if config.read(SPLIT_EXPERTS, bool, False):
        for part in ("gate", "up", "down"):
            names |= {
                part: f"{block}.experts.{{expert}}.{part}_proj.weight",
                f"shared_{part}": f"{shared}.{part}_proj.weight",
            }
        return names
    return names | {
        "fused_gate_up": f"{block}.input_linear.weight.{{expert}}",
        "down": f"{block}.output_linear.weight.{{expert}}",
        "fused_shared": f"{shared}.input_linear.weight",
        "shared_down": f"{shared}.output_linear.weight",
    }


FAMILIES = {
    "arcee": describe_arcee,
    "bitnet": describe_bitnet,
    "granitemoe": describe_granite_moe,
    "granitemoeshared": describe_granite_moe,
    "hunyuan_v1_dense": describe_hunyuan,
    "hunyuan_v1_moe": describe_hunyuan_moe,
    "ministral3": describe_ministral3,
    "nemotron": describe_nemotron,
    "olmo2": describe_olmo2,
    "olmo3": describe_olmo3,
    "seed_oss": describe_seed_oss,
}
