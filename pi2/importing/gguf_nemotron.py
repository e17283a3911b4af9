"""Nemotron-H in GGUF files: blocks that are Mamba-2, attention or an FFN alone, as its checkpoints
have them (`pi2.importing.blocks`)."""

from __future__ import annotations

from typing import Any

from pi2.importing.blocks import list_beginnings, rename_tensors
from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.safetensors_file import SourceTensor

_BLOCK = "backbone.layers.{layer}"
_MIXER, _MAMBA = f"{_BLOCK}.mixer", f"{_BLOCK}.mamba"
NEMOTRON_HYBRID_NAMES = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
    "blk.{layer}.attn_norm.weight": f"{_BLOCK}.norm.weight",
    **{
        f"blk.{{layer}}.{name}.{part}": f"{_MIXER}.{original}.{part}"
        for part in ("weight", "bias")
        for name, original in (
            ("attn_q", "q_proj"),
            ("attn_k", "k_proj"),
            ("attn_v", "v_proj"),
            ("attn_output", "o_proj"),
            ("ffn_up", "up_proj"),
            ("ffn_down", "down_proj"),
        )
    },
    **{
        f"blk.{{layer}}.ssm_{name}.{part}": f"{_MAMBA}.{original}.{part}"
        for part in ("weight", "bias")
        for name, original in (("in", "in_proj"), ("out", "out_proj"), ("conv1d", "conv1d"))
    },
    "blk.{layer}.ssm_norm.weight": f"{_MAMBA}.norm.weight",
    "blk.{layer}.ssm_dt.bias": f"{_MAMBA}.dt_bias",
    "blk.{layer}.ssm_a": f"{_MAMBA}.A_log",
    "blk.{layer}.ssm_d": f"{_MAMBA}.D",
    "blk.{layer}.ffn_gate_inp.weight": f"{_MIXER}.gate.weight",
    "blk.{layer}.exp_probs_b.bias": f"{_MIXER}.gate.e_score_correction_bias",
    "blk.{layer}.ffn_latent_down.weight": f"{_MIXER}.fc1_latent_proj.weight",
    "blk.{layer}.ffn_latent_up.weight": f"{_MIXER}.fc2_latent_proj.weight",
    "blk.{layer}.ffn_up_exps.weight": f"{_MIXER}.experts.{{expert}}.up_proj.weight",
    "blk.{layer}.ffn_down_exps.weight": f"{_MIXER}.experts.{{expert}}.down_proj.weight",
    "blk.{layer}.ffn_up_shexp.weight": f"{_MIXER}.shared_experts.up_proj.weight",
    "blk.{layer}.ffn_down_shexp.weight": f"{_MIXER}.shared_experts.down_proj.weight",
}
"""Names of transformers by those of files, but that what belongs to Mamba-2 says so."""


_OWN = {
    "mamba": ".mamba.in_proj.weight",
    "attention": ".mixer.q_proj.weight",
    "mlp": ".mixer.up_proj.weight",
    "moe": ".mixer.gate.weight",
}
"""Tensors that tell what a block is."""


def read_nemotron_hybrid(
    metadata: Metadata, config: dict[str, Any], activation: str
) -> dict[str, Any]:
    """A decoder with sizes of Mamba-2 and of shared experts.

    Raises `UserError` P532 as `Metadata.read`.
    """
    count = metadata.read_count
    heads = count("{arch}.ssm.time_step_rank")
    epsilon = "{arch}.attention.layer_norm_rms_epsilon"
    found = read_decoder(metadata, config, activation) | {
        "layer_norm_epsilon": metadata.read(epsilon, float, 1e-5),
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, count("{arch}.ssm.inner_size") // heads),
        "n_groups": count("{arch}.ssm.group_count"),
        "ssm_state_size": count("{arch}.ssm.state_size"),
        "conv_kernel": count("{arch}.ssm.conv_kernel"),
    }
    if metadata.read("{arch}.expert_count", int, 0):
        shared = "{arch}.expert_shared_feed_forward_length"
        found["moe_shared_expert_intermediate_size"] = count(shared)
        latent = metadata.read("{arch}.moe_latent_size", int, 0)
        found |= {"moe_latent_size": latent} if latent else {}
    return found


def join_blocks(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    """State the kinds of blocks, as their tensors tell them, and biases; give tensors the names of
    the layers that the blocks are."""
    for key, part in (("use_conv_bias", "conv1d"), ("use_bias", "in_proj")):
        config[key] = any(name.endswith(f".{part}.bias") for name in tensors)
    kinds, blocks = [], config["num_hidden_layers"]
    for block in range(blocks):
        start = f"backbone.layers.{block}"
        found = (kind for kind, end in _OWN.items() if f"{start}{end}" in tensors)
        kinds.append(next(found, "block without tensors"))
        dense = tensors.get(f"{start}{_OWN['mlp']}")
        if dense is not None:
            config["intermediate_size"] = dense.shape[0]
    # Blocks are counted in a file, and become fewer layers.
    config |= {"layers_block_type": kinds, "num_hidden_layers": None}
    whole = {name.replace(".mamba.", ".mixer."): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors |= rename_tensors(whole, list_beginnings(config))
