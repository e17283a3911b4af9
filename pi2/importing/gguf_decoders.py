"""What GGUF files of decoders state, under the names of configurations; and families that state
little else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pi2.importing.config import FUSED_ORDER, ROTATED_SHARE, TURN_FACTOR
from pi2.importing.gguf_latent import read_latent, read_score_factor
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_mixtures import read_experts
from pi2.importing.safetensors_file import SourceTensor


def read_decoder(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """What most families state: sizes, positions, norms, windows and experts.

    Raises `UserError` P532 as `Metadata.read`.
    """
    read, count = metadata.read, metadata.read_count
    heads = config["num_attention_heads"]
    head_dim = count("{arch}.attention.key_length", max(1, config["hidden_size"] // heads))
    expert = read("{arch}.expert_feed_forward_length", int, 0)
    ffn = count("{arch}.feed_forward_length", expert or None)
    found: dict[str, Any] = {
        "intermediate_size": ffn,
        "num_key_value_heads": count("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": activation,
        "rope_theta": read("{arch}.rope.freq_base", float, 10000.0),
    }
    is_latent = metadata.has("{arch}.attention.kv_lora_rank")
    rotated = read("{arch}.rope.dimension_count", int, head_dim)
    if is_latent:
        found |= read_latent(metadata, rotated)
    else:
        found[ROTATED_SHARE] = rotated / head_dim
    if metadata.has("{arch}.attention.layer_norm_rms_epsilon"):
        found["rms_norm_eps"] = read("{arch}.attention.layer_norm_rms_epsilon", float)
    else:
        epsilon = read("{arch}.attention.layer_norm_epsilon", float, 1e-5)
        found |= dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), epsilon)
    if read("{arch}.expert_count", int, 0):
        found |= read_experts(metadata, ffn)
    if metadata.has("{arch}.attention.clamp_kqv"):
        found["clip_qkv"] = read("{arch}.attention.clamp_kqv", float)
    window = read("{arch}.attention.sliding_window", int, 0)
    if window:
        found["sliding_window"] = window
    if metadata.has("{arch}.use_parallel_residual"):
        found["use_parallel_residual"] = read("{arch}.use_parallel_residual", bool)
    found[TURN_FACTOR] = read("{arch}.rope.scaling.attn_factor", float, 1.0)
    scaling = _read_scaling(metadata, config["max_position_embeddings"])
    if scaling and is_latent:
        scaling |= read_score_factor(metadata)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _read_scaling(metadata: Metadata, context: int) -> dict[str, Any]:
    kind = metadata.read("{arch}.rope.scaling.type", str, "linear")
    factor = metadata.read("{arch}.rope.scale_linear", float, 0.0)
    # 0 stands for nothing, and so does a factor of positions that are not scaled.
    factor = metadata.read("{arch}.rope.scaling.factor", float, factor) or 1.0
    if kind in ("none", "") or (kind == "linear" and factor == 1.0):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.read(
            "{arch}.rope.scaling.original_context_length", int, context
        )
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"{{arch}}.rope.scaling.yarn_{name}"):
                scaling[name] = metadata.read(f"{{arch}}.rope.scaling.yarn_{name}", float)
    return scaling


def read_llama(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Llama, which files call Mistral and Mixtral too."""
    found = read_decoder(metadata, config, activation)
    if metadata.read("{arch}.expert_count", int, 0):
        found["model_type"] = "mixtral"
    elif "sliding_window" in found:
        found["model_type"] = "mistral"
    return found


def complete_llama(config: dict[str, Any], tensors: Iterable[str]) -> None:
    """Llama with biases of queries, keys and values alone is Qwen 2, which is just that."""
    ends = ("q_proj.bias", "o_proj.bias")
    has_qkv, has_output = (
        any(name.endswith(f".self_attn.{end}") for name in tensors) for end in ends
    )
    if config["model_type"] == "llama" and has_qkv and not has_output:
        config["model_type"] = "qwen2"


def read_mixture(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Families all of whose layers are mixtures: the only size is that of experts."""
    found = read_decoder(metadata, config, activation)
    if "moe_intermediate_size" in found:
        found["intermediate_size"] = found["moe_intermediate_size"]
    return found


def read_gpt_oss(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """gpt-oss, whose scaling of positions is not cut to whole pairs."""
    found = read_mixture(metadata, config, activation)
    if "rope_scaling" in found:
        found["rope_scaling"]["truncate"] = False
    return found


def read_cohere(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Cohere's Command, with a factor of logits."""
    found = read_decoder(metadata, config, activation)
    return found | {"logit_scale": metadata.read("{arch}.logit_scale", float)}


def read_olmo2(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has a window in three of four layers where the file does not say
    in which."""
    found = read_decoder(metadata, config, activation)
    if "sliding_window" not in found:
        return found
    layers = config["num_hidden_layers"]
    flags = metadata.read_flags("{arch}.attention.sliding_window_pattern", layers)
    if flags is None:
        flags = [(layer + 1) % 4 != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return found | {"model_type": "olmo3", "layer_types": kinds}


def read_falcon(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Falcon, whose configurations have names of their own."""
    found = read_decoder(metadata, config, activation)
    kv_heads = found["num_key_value_heads"]
    return found | {
        "ffn_hidden_size": found["intermediate_size"],
        "layer_norm_epsilon": metadata.read("{arch}.attention.layer_norm_epsilon", float, 1e-5),
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        FUSED_ORDER: "stacked",
    }


def read_opt(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """OPT, which turns nothing; all of its models compute ReLU."""
    return {
        "ffn_dim": metadata.read_count("{arch}.feed_forward_length"),
        "activation_function": activation,
    }


def complete_opt(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    """State how many positions there are."""
    positions = tensors.get("model.decoder.embed_positions.weight")
    if positions is not None:
        # PowerInfer counts the two rows before position 0 too.
        config["max_position_embeddings"] = positions.shape[0] - 2
