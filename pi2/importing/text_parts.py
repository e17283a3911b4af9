"""Models that read pictures, sound or video too: the configuration of the part that reads text.

That part is one of the families of `pi2.importing.families`.  Where positions have three numbers
(of time, height and width), those of text are the same, so that heads turn as in plain models.
"""

from __future__ import annotations

from typing import Any

TEXT_PARTS: dict[str, dict[str, Any]] = {
    "aria": {"model_type": "aria_text"},
    "aya_vision": {"model_type": "cohere2"},
    # As cohere2 does, logits are scaled here, which transformers leaves out of both.
    "cohere2_vision": {"model_type": "cohere2"},
    "deepseek_vl": {"model_type": "llama"},
    "deepseek_vl_hybrid": {"model_type": "llama"},
    "exaone4_5": {"model_type": "exaone4"},
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "glm46v": {"model_type": "glm4v_text"},
    "glm4v": {"model_type": "glm4v_text"},
    "glm4v_moe": {"model_type": "glm4v_moe_text"},
    "glmasr": {"model_type": "llama"},
    "got_ocr2": {"model_type": "qwen2"},
    "granite_speech": {"model_type": "granite"},
    "idefics2": {"model_type": "mistral"},
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "janus": {"model_type": "llama"},
    "kimi_k25": {"model_type": "kimi_k2"},
    "lfm2_vl": {"model_type": "lfm2"},
    "lfm3_vl": {"model_type": "lfm3"},
    "lighton_ocr": {"model_type": "qwen3"},
    "llama4": {
        "model_type": "llama4_text",
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
    },
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "llama"},
    "llava_next_video": {"model_type": "llama"},
    "llava_onevision": {"model_type": "qwen2"},
    "minimax_m3_vl": {"model_type": "minimax_m3_vl_text"},
    "minicpmv4_6": {"model_type": "qwen3_5_text"},
    "mistral3": {"model_type": "mistral"},
    "ovis2": {"model_type": "qwen2"},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text"},
    "qwen2_audio": {"model_type": "qwen2"},
    "qwen2_vl": {"model_type": "qwen2_vl_text"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
    "qwen3_asr": {"model_type": "qwen3"},
    "qwen3_vl": {"model_type": "qwen3_vl_text"},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe_text"},
    "smolvlm": {"model_type": "llama"},
    "vibevoice_asr": {"model_type": "qwen2"},
    "video_llama_3": {"model_type": "qwen2"},
    "video_llava": {"model_type": "llama"},
    "vipllava": {"model_type": "llama"},
    "voxtral": {"model_type": "llama"},
}
"""Families of such models, and what their configurations leave out of the text's because it is the
family's default."""

_FLAT = ("qwen2_5_vl", "qwen2_vl")
"""Families whose configurations have no ``text_config`` where older transformers wrote them: what
they say of the text stands beside ``vision_config``."""
_OUTER = ("bos_token_id", "eos_token_id", "_name_or_path")
"""Keys of the whole model that count where the text's configuration does not state them."""


def unwrap_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the part that reads text; ``config`` itself for models of text alone."""
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return config
    if isinstance(text, dict):
        shared = {key: config[key] for key in _OUTER if key in config}
        # The head is the whole model's: what the text's part says of it, transformers leaves alone.
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        return {**TEXT_PARTS[kind], **shared, **text, **tied}
    return {**config, **TEXT_PARTS[kind]} if kind in _FLAT else config
