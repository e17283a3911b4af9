"""What GGUF files of Gemma 2 and 3 state, under the names of configurations."""

from __future__ import annotations

from typing import Any

from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata

_LARGEST = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models with 27 billion weights."""


def read_gemma2(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Gemma 2 and 3; scores of the largest models have another scale."""
    read = metadata.read
    found = read_decoder(metadata, config, activation)
    width = found["head_dim"]
    if config["num_hidden_layers"] == _LARGEST[config["model_type"]]:
        width = config["hidden_size"] // max(1, config["num_attention_heads"])
    found |= {"hidden_activation": activation, "query_pre_attn_scalar": width}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[key] = read(f"{{arch}}.{key}", float) if metadata.has(f"{{arch}}.{key}") else None
    return found


def read_gemma3(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """Gemma 3, with other positions in layers with a window."""
    read = metadata.read
    return read_gemma2(metadata, config, activation) | {
        "rope_theta": read("{arch}.rope.freq_base", float, 1_000_000.0),
        "rope_local_base_freq": read("{arch}.rope.freq_base_swa", float, 10_000.0),
        "sliding_window_pattern": read("{arch}.attention.sliding_window_pattern", int, 6),
    }
