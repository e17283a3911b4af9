"""Models that read pictures, sound or video too: the configuration of the part that reads text.

That part is one of the families of `pi2.importing.families`.  Where positions have three numbers
(of time, height and width), those of text are the same, so that heads turn as in plain models.

Checkpoints whose layers are single blocks: Nemotron-H has attention, Mamba-2 or an FFN in each.

A block is normalised, mixed and added to the residual stream alone, so that blocks that mix tokens
and the FFN that follows them are a layer.  A layer may have no mixer, where FFNs follow each other,
and no FFN, at the end of the model or where attention comes a second time.  Tensors are renamed by
these layers; `describe_layers` says what they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "M": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
"""Kinds of blocks by their names in configurations, old and new, and in patterns."""
_OWNERS = {"mamba": "mamba.{mixer}", "attention": "self_attn", "mlp": "mlp", "moe": "mlp"}
_FIXED = (("backbone.embeddings.", "model.embed_tokens."), ("backbone.norm_f.", "model.norm."))
_NUMBERED = re.compile(
    r"(backbone\.layers\.\d{1,9}\.(?:mixer|norm)\."
    r"|model\.layers\.\d{1,9}\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.))(.+)"
)

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks that are a layer together."""

    mixers: tuple[str, ...]
    first: int
    """Number of the first block; the others follow it."""
    ffn: str
    """``mlp`` or ``moe``; nothing where there is none."""


def describe_layers(config: Mapping[str, Any]) -> list[Layer] | str:
    """The layers that the blocks of a configuration are, or what is wrong with them."""
    stated = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if not isinstance(stated, list | str) or not stated:
        return "it does not state layers_block_type"
    kinds: list[str] = []
    for item in stated:
        if not isinstance(item, str) or item not in _KINDS:
            return f"{item!r} in layers_block_type is no kind of block"
        kinds.append(_KINDS[item])
    return _group(kinds)


def _group(kinds: Sequence[str]) -> list[Layer]:
    layers, mixers, first = [], list[str](), 0
    for number, kind in enumerate(kinds):
        if kind in ("mlp", "moe"):
            layers.append(Layer(tuple(mixers), first, kind))
            mixers, first = [], number + 1
            continue
        if kind == "attention" and kind in mixers:
            layers.append(Layer(tuple(mixers), first, ""))
            mixers, first = [], number
        mixers.append(kind)
    return [*layers, Layer(tuple(mixers), first, "")] if mixers else layers


def list_beginnings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Beginnings of names in the checkpoint, and those by which pi2 knows the tensors; none where
    the blocks are no layers, which is said later."""
    if config.get("model_type") == "kimi_linear":
        return _list_kimi(config)
    if config.get("model_type") != "nemotron_h":
        return []
    layers = describe_layers(config)
    if isinstance(layers, str):
        return []
    found = list(_FIXED)
    for number, layer in enumerate(layers):
        norms = [
            f"inner_layernorm.{n}" if n else "input_layernorm" for n in range(len(layer.mixers))
        ]
        parts = list(zip(layer.mixers, norms, strict=True))
        if layer.ffn:
            parts.append((layer.ffn, "post_attention_layernorm"))
        for block, (kind, norm) in enumerate(parts, start=layer.first):
            old, new = f"backbone.layers.{block}", f"model.layers.{number}"
            owner = _OWNERS[kind].format(mixer=block - layer.first)
            found.append((f"{old}.mixer.", f"{new}.{owner}."))
            found.append((f"{old}.norm.", f"{new}.{norm}."))
    return found


def _list_kimi(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """FFNs of Kimi Linear's layers without experts: transformers writes them by the name of a
    mixture."""
    count = config.get("num_hidden_layers")
    layers = [f"model.layers.{n}" for n in range(min(count, 1024) if type(count) is int else 0)]
    return [(f"{layer}.block_sparse_moe.", f"{layer}.mlp.") for layer in layers]


def rename_tensors(
    tensors: Mapping[str, _Tensor], beginnings: Sequence[tuple[str, str]]
) -> dict[str, _Tensor]:
    """The tensors by the names that pi2 knows them by."""
    new_by_old = dict(beginnings)
    renamed = {}
    for name, tensor in tensors.items():
        numbered = _NUMBERED.fullmatch(name)
        fixed = next((old for old, _ in _FIXED if name.startswith(old)), None)
        old = numbered[1] if numbered else fixed
        new = None if old is None else new_by_old.get(old)
        renamed[name if old is None or new is None else new + name[len(old) :]] = tensor
    return renamed


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
