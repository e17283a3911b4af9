"""Llama 4 in GGUF files, which leave out what all models of the family have alike."""

from __future__ import annotations

from typing import Any

from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata

_LAYER = "model.layers.{layer}"
_FFN = f"{_LAYER}.feed_forward"
_PARTS = ("gate", "up", "down")
LLAMA4_NAMES = {
    "blk.{layer}.ffn_gate_inp.weight": f"{_FFN}.router.weight",
    **{
        f"blk.{{layer}}.ffn_{part}{end}.weight": f"{_FFN}{owner}.{part}_proj.weight"
        for part in _PARTS
        for end, owner in (("", ""), ("_exps", ".experts.{expert}"), ("_shexp", ".shared_expert"))
    },
}
"""Names of FFNs in checkpoints by those in files."""

_WITHOUT_NORMS = 128
"""Experts of the model whose heads have no norms: Maverick, as llama.cpp tells it."""


def read_llama4(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """A decoder with FFNs of two sizes, and what its layers have.

    Raises `UserError` P532 as `Metadata.read`.
    """
    found = read_decoder(metadata, config, activation)
    found |= {
        "intermediate_size": metadata.read_count("{arch}.expert_feed_forward_length"),
        "intermediate_size_mlp": found["intermediate_size"],
        "interleave_moe_layer_step": metadata.read_count("{arch}.interleave_moe_layer_step"),
        "use_qk_norm": metadata.read_count("{arch}.expert_count") != _WITHOUT_NORMS,
    }
    window = "{arch}.attention.sliding_window"
    if metadata.has(window) and metadata.read(window, int) == 0:
        # All layers turn heads, and see all tokens.
        layers = config["num_hidden_layers"]
        found |= {"attention_chunk_size": None, "no_rope_layers": [1] * layers}
    return found
