"""MiniMax M2."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables, describe_decoder


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


FAMILIES = {"minimax_m2": describe_minimax_m2}
