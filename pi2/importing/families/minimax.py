"""MiniMax M2 and M3."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder
from pi2.importing.families.experts import add_dense_layers, list_dense_layers
from pi2.importing.families.kimi import name_kimi_experts


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


FAMILIES = {"minimax_m2": describe_minimax_m2, "minimax_m3_vl_text": describe_minimax_m3}
