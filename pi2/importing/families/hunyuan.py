"""Hunyuan: dense, with experts, and Hunyuan 3."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.experts import add_listed_experts, name_experts
from pi2.importing.families.llama import describe_llama


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


def describe_hunyuan3(config: Config) -> Tables:
    """Hunyuan 3: norms of heads before they turn, and experts that sigmoids weight."""
    config.demand("mlp_bias", False, False)
    tables = describe_decoder(config)
    bias = config.read("attention_bias", bool, False)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {"qkv_bias": bias, "output_bias": bias, "head_norm": True}
    add_listed_experts(config, tables, 1)
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True}
    tables["moe"]["scaling"] = config.read("router_scaling_factor", float, 2.826)
    tables["tensors"] |= name_experts(f"{LAYER}.mlp", shared="shared_mlp")
    tables["tensors"] |= {
        "router": f"{LAYER}.mlp.router.gate.weight",
        "choice_bias": f"{LAYER}.mlp.expert_bias",
    }
    return tables


FAMILIES = {
    "hunyuan_v1_dense": describe_hunyuan,
    "hunyuan_v1_moe": describe_hunyuan_moe,
    "hy_v3": describe_hunyuan3,
}
