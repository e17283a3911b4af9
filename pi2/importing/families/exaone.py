"""EXAONE 4, K-EXAONE, and Kolibri."""

from __future__ import annotations

from pi2.importing.config import Config, read_window
from pi2.importing.families.decoders import (
    LAYER,
    Tables,
    describe_decoder,
    has_cycle,
    omit_positions,
)
from pi2.importing.families.experts import add_listed_experts, add_sigmoids, name_experts
from pi2.importing.families.olmo import describe_olmo2
from pi2.importing.families.qwen import add_qwen_experts, add_shared_experts


def describe_exaone4(config: Config) -> Tables:
    """OLMo 2 with norms of each head, whose layers have positions where they have a window."""
    tables = describe_olmo2(config.change({"attention_bias": False}))
    tables["attention"] = {"head_norm": True}
    return tables | add_exaone_window(config, tables)


def add_exaone_window(config: Config, tables: Tables) -> Tables:
    """State the window of EXAONE's layers, and return what says which have no positions."""
    layers, values = tables["shape"]["layers"], config.values
    if "sliding_window" in values and not config.has("sliding_window"):
        return {}
    cycle = 4
    if not config.read_list("layer_types"):
        cycle = config.read("sliding_window_pattern", int, cycle)
    window = read_window(config, layers, has_cycle(cycle), width=4096)
    tables["attention"] |= window
    turned = window.get("window_layers", range(layers)) if window else ()
    return omit_positions(set(range(layers)) - set(turned))


def describe_exaone_moe(config: Config) -> Tables:
    """K-EXAONE: EXAONE 4 with norms before attention and FFN, and experts."""
    tables = describe_decoder(config)
    tables["norm"]["epsilon"] = config.read("rms_norm_eps", float, 1e-5)
    tables["attention"] = {"head_norm": True}
    tables |= add_exaone_window(config, tables)
    add_listed_experts(config, tables, config.read("first_k_dense_replace", int, 1))
    add_sigmoids(config, tables, 1, 1)
    tables["moe"]["scaling"] = config.read("routed_scaling_factor", float, 2.5)
    tables["tensors"]["choice_bias"] = f"{LAYER}.mlp.e_score_correction_bias"
    return tables


def describe_kolibri(config: Config) -> Tables:
    """Kolibri: EXAONE's windows and positions, norms before and after, and experts that are chosen
    by scores and a bias."""
    tables = describe_decoder(config.set_default("intermediate_size", 1))
    layers = tables["shape"]["layers"]
    tables["norm"]["outputs"] = True
    tables["attention"] = {"head_norm": True}
    values, window = config.values, {}
    if "sliding_window" not in values or config.has("sliding_window"):
        window = read_window(config, layers, has_cycle(5), width=513)
        turned = window.get("window_layers", range(layers)) if window else ()
        tables["attention"] |= window
        tables |= omit_positions(set(range(layers)) - set(turned))
    add_qwen_experts(config, tables)
    add_shared_experts(config.set_default("shared_expert_intermediate_size", 512), tables)
    tables["moe"].pop("shared_gate", None)
    tables["moe"].pop("dense_layers", None)
    tables["moe"] |= {"router": "sigmoid", "choice_bias": True, "choice_bias_of": "score"}
    names = name_experts(f"{LAYER}.mlp", shared="shared_experts")
    tables["tensors"] = names | {
        "attention_output_norm": f"{LAYER}.post_attn_norm.weight",
        "ffn_output_norm": f"{LAYER}.post_ffn_norm.weight",
        "choice_bias": f"{LAYER}.moe.router.expert_bias",
    }
    return tables


FAMILIES = {
    "exaone4": describe_exaone4,
    "exaone_moe": describe_exaone_moe,
    "kolibri1": describe_kolibri,
}
