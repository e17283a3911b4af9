"""What GGUF files of Granite state, under the names of configurations."""

from __future__ import annotations

from typing import Any

from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata


def read_granite(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """A decoder with factors."""
    read = metadata.read
    return read_decoder(metadata, config, activation) | {
        "attention_multiplier": read("{arch}.attention.scale", float, 1.0),
        "embedding_multiplier": read("{arch}.embedding_scale", float, 1.0),
        "residual_multiplier": read("{arch}.residual_scale", float, 1.0),
        "logits_scaling": read("{arch}.logit_scale", float, 1.0),
    }


def read_granite_hybrid(
    metadata: Metadata, config: dict[str, Any], activation: str
) -> dict[str, Any]:
    """Granite with Mamba-2 in most layers."""
    read, count = metadata.read, metadata.read_count
    found = read_granite(metadata, config, activation)
    experts = read("{arch}.expert_count", int, 0)
    shared = read("{arch}.expert_shared_feed_forward_length", int, 0)
    return found | {
        "num_local_experts": experts,
        # Where there are no experts, the shared FFN is the only one.
        "shared_intermediate_size": shared if experts else found["intermediate_size"],
        # llama.cpp's converter says so where no positions are turned.
        "position_embedding_type": "rope"
        if read("{arch}.rope.scaling.finetuned", bool, True)
        else "nope",
        "mamba_expand": count("{arch}.ssm.inner_size") / max(1, config["hidden_size"]),
        "mamba_n_heads": count("{arch}.ssm.time_step_rank"),
        "mamba_n_groups": count("{arch}.ssm.group_count"),
        "mamba_d_state": count("{arch}.ssm.state_size"),
        "mamba_d_conv": count("{arch}.ssm.conv_kernel"),
    }
