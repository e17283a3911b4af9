"""What ``config.json`` would say of a model, from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.importing.config import FUSED_ORDER, ROTATED_SHARE
from pi2.importing.gguf_architectures import Architecture
from pi2.importing.gguf_gemma3n import read_gemma3n
from pi2.importing.gguf_gemma4 import read_gemma4
from pi2.importing.gguf_latent import read_latent, read_score_factor
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_mixtures import read_experts
from pi2.importing.gguf_nemotron import read_nemotron_hybrid
from pi2.importing.gguf_states import DeltaHeads

MOST_CHANNELS = 2**20
"""Most elements of all heads together."""
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models with 27 billion weights."""


def make_config(
    metadata: Metadata, architecture: Architecture, *, vocab: int, tied: bool, sparse: bool
) -> dict[str, Any]:
    """The configuration.  ``vocab``: rows of the embedding table; ``tied``: there is no head;
    ``sparse``: the file has predictors, so that its model computes ReLU."""
    read, count = metadata.read, metadata.read_count
    hidden = count("{arch}.embedding_length")
    heads = count("{arch}.attention.head_count")
    head_dim = count("{arch}.attention.key_length", max(1, hidden // heads))
    layers, context = count("{arch}.block_count"), count("{arch}.context_length")
    later = read("{arch}.nextn_predict_layers", int, 0)
    if 0 < later < layers:
        layers -= later  # they draft, and are no part of the model
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "_name_or_path": read("general.name", str, metadata.file.stem),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        **architecture.settings,
        **_read_tokens(metadata),
    }
    if architecture.model_type in ("gemma3n_text", "gemma4_text"):
        read_own = read_gemma4 if architecture.model_type == "gemma4_text" else read_gemma3n
        own = read_own(metadata, layers)
        return config | own | {"hidden_activation": architecture.activation}
    expert = read("{arch}.expert_feed_forward_length", int, 0)
    ffn = count("{arch}.feed_forward_length", expert or None)
    if architecture.model_type == "opt":
        return config | {"ffn_dim": ffn, "activation_function": architecture.activation}
    activation = "relu" if sparse else architecture.activation
    config |= {
        "intermediate_size": ffn,
        "num_key_value_heads": count("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": activation,
        "rope_theta": read("{arch}.rope.freq_base", float, 10000.0),
    }
    is_latent = metadata.has("{arch}.attention.kv_lora_rank")
    rotated = read("{arch}.rope.dimension_count", int, head_dim)
    if is_latent:
        config |= read_latent(metadata, rotated)
    else:
        config[ROTATED_SHARE] = rotated / head_dim
    if metadata.has("{arch}.attention.layer_norm_rms_epsilon"):
        config["rms_norm_eps"] = read("{arch}.attention.layer_norm_rms_epsilon", float)
    else:
        epsilon = read("{arch}.attention.layer_norm_epsilon", float, 1e-5)
        config |= dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), epsilon)
    if read("{arch}.expert_count", int, 0):
        config |= read_experts(metadata, architecture, ffn)
    if architecture.model_type == "falcon":
        kv_heads = config["num_key_value_heads"]
        config |= {"ffn_hidden_size": ffn, "layer_norm_epsilon": config["layer_norm_eps"]}
        config |= {"num_kv_heads": kv_heads, "multi_query": kv_heads == 1, FUSED_ORDER: "stacked"}
    if architecture.model_type in ("gemma2", "gemma3_text"):
        config |= _read_gemma(metadata, config)
    if architecture.model_type.startswith("granite"):
        config |= _read_granite(metadata)
    if architecture.model_type.startswith("cohere"):
        config["logit_scale"] = read("{arch}.logit_scale", float)
    if metadata.has("{arch}.attention.clamp_kqv"):
        config["clip_qkv"] = read("{arch}.attention.clamp_kqv", float)
    if architecture.model_type == "granitemoehybrid":
        config |= _read_mamba(metadata, config)
    elif architecture.model_type == "nemotron_h":
        config |= read_nemotron_hybrid(metadata)
    elif metadata.has("{arch}.ssm.group_count"):
        config |= _read_states(metadata)
    if metadata.has("{arch}.shortconv.l_cache"):
        config |= {"conv_L_cache": count("{arch}.shortconv.l_cache")}
        config |= {"norm_eps": config["rms_norm_eps"]}
    window = read("{arch}.attention.sliding_window", int, 0)
    if window:
        config["sliding_window"] = window
        if architecture.model_type == "llama" and config["model_type"] == "llama":
            config["model_type"] = "mistral"
        if architecture.model_type == "olmo2":
            config |= {"model_type": "olmo3", "layer_types": _read_windows(metadata, layers)}
    if metadata.has("{arch}.use_parallel_residual"):
        config["use_parallel_residual"] = read("{arch}.use_parallel_residual", bool)
    scaling = _read_scaling(metadata, context)
    if scaling and architecture.model_type == "gpt_oss":
        scaling["truncate"] = False
    if scaling and is_latent:
        scaling |= read_score_factor(metadata)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _read_states(metadata: Metadata) -> dict[str, Any]:
    """Sizes of Qwen's layers with a state."""
    values = metadata.read_count("{arch}.ssm.time_step_rank")
    return {
        "linear_num_key_heads": metadata.read_count("{arch}.ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": metadata.read_count("{arch}.ssm.state_size"),
        "linear_value_head_dim": max(1, metadata.read_count("{arch}.ssm.inner_size") // values),
        "linear_conv_kernel_dim": metadata.read_count("{arch}.ssm.conv_kernel"),
    }


def _read_windows(metadata: Metadata, layers: int) -> list[str]:
    """Kinds of OLMo 3's layers: three of four have a window where the file does not say which."""
    flags = metadata.read_flags("{arch}.attention.sliding_window_pattern", layers)
    if flags is None:
        flags = [(layer + 1) % 4 != 0 for layer in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _read_granite(metadata: Metadata) -> dict[str, Any]:
    """Granite's factors."""
    read = metadata.read
    return {
        "attention_multiplier": read("{arch}.attention.scale", float, 1.0),
        "embedding_multiplier": read("{arch}.embedding_scale", float, 1.0),
        "residual_multiplier": read("{arch}.residual_scale", float, 1.0),
        "logits_scaling": read("{arch}.logit_scale", float, 1.0),
    }


def _read_mamba(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of Granite's Mamba-2 layers and FFNs."""
    read, count = metadata.read, metadata.read_count
    width = count("{arch}.ssm.inner_size")
    experts = read("{arch}.expert_count", int, 0)
    shared = read("{arch}.expert_shared_feed_forward_length", int, 0)
    # Where there are no experts, the shared FFN is the only one.
    shared = shared if experts else config["intermediate_size"]
    return {
        "num_local_experts": experts,
        "shared_intermediate_size": shared,
        # llama.cpp's converter says so where no positions are turned.
        "position_embedding_type": "rope"
        if read("{arch}.rope.scaling.finetuned", bool, True)
        else "nope",
        "mamba_expand": width / max(1, config["hidden_size"]),
        "mamba_n_heads": count("{arch}.ssm.time_step_rank"),
        "mamba_n_groups": count("{arch}.ssm.group_count"),
        "mamba_d_state": count("{arch}.ssm.state_size"),
        "mamba_d_conv": count("{arch}.ssm.conv_kernel"),
    }


def read_delta_heads(metadata: Metadata, is_tiled: bool) -> DeltaHeads | None:
    """Heads of Qwen's layers with a state; None of a file that has none."""
    if not metadata.has("{arch}.ssm.group_count"):
        return None
    sizes = _read_states(metadata)
    heads = DeltaHeads(
        keys=sizes["linear_num_key_heads"],
        values=sizes["linear_num_value_heads"],
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        is_tiled=is_tiled,
    )
    wide = max(heads.keys, heads.values) * max(heads.key_dim, heads.value_dim)
    return None if heads.values % heads.keys or wide > MOST_CHANNELS else heads


def list_kinds(layers: int, tensors: Container[str]) -> list[str]:
    """Kinds of layers, by the tensors that they have."""
    return [
        "full_attention"
        if f"model.layers.{layer}.self_attn.k_proj.weight" in tensors
        else "linear_attention"
        for layer in range(layers)
    ]


def _read_gemma(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have besides; scores of the largest models have another scale."""
    read = metadata.read
    is_largest = config["num_hidden_layers"] == _LARGEST_GEMMAS[config["model_type"]]
    width = config["head_dim"]
    if is_largest:
        width = config["hidden_size"] // max(1, config["num_attention_heads"])
    found: dict[str, Any] = {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": width,
    }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[key] = read(f"{{arch}}.{key}", float) if metadata.has(f"{{arch}}.{key}") else None
    if config["model_type"] == "gemma3_text":
        found |= {
            "rope_theta": read("{arch}.rope.freq_base", float, 1_000_000.0),
            "rope_local_base_freq": read("{arch}.rope.freq_base_swa", float, 10_000.0),
            "sliding_window_pattern": read("{arch}.attention.sliding_window_pattern", int, 6),
        }
    return found


def _read_tokens(metadata: Metadata) -> dict[str, Any]:
    ends = ("eos", "eot", "eom")
    tokens: dict[str, Any] = {"eos_token_id": []}
    for end in ends:
        key = f"tokenizer.ggml.{end}_token_id"
        if metadata.has(key) and metadata.read(key, int) not in tokens["eos_token_id"]:
            tokens["eos_token_id"].append(metadata.read(key, int))
    if metadata.has("tokenizer.ggml.bos_token_id"):
        tokens["bos_token_id"] = metadata.read("tokenizer.ggml.bos_token_id", int)
    return tokens


def _read_scaling(metadata: Metadata, context: int) -> dict[str, Any]:
    kind = metadata.read("{arch}.rope.scaling.type", str, "none")
    if kind in ("none", ""):
        factor = metadata.read("{arch}.rope.scale_linear", float, 1.0)
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": metadata.read("{arch}.rope.scaling.factor", float),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.read(
            "{arch}.rope.scaling.original_context_length", int, context
        )
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"{{arch}}.rope.scaling.yarn_{name}"):
                scaling[name] = metadata.read(f"{{arch}}.rope.scaling.yarn_{name}", float)
    return scaling


def recover_llama3(factors: F32, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling whose frequency divisors are ``factors`` [head_dim / 2].

    Files have these numbers (``rope_freqs.weight``) instead of what they were computed from.  {}
    where nothing is scaled; None if no such scaling is known.
    """
    if (factors == 1.0).all():
        return {}
    if theta <= 1.0 or not (np.isfinite(factors) & (factors >= 1.0)).all():
        return None
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) * 2 / head_dim)
    low, high = 1.0, 4.0
    for original in (2**power for power in range(4, 20)):
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None
