"""BitNet in GGUF files."""

from __future__ import annotations

from typing import Any

from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata

_LAYER = "model.layers.{layer}"
BITNET_NAMES = {
    "blk.{layer}.attn_sub_norm.weight": f"{_LAYER}.self_attn.attn_sub_norm.weight",
    "blk.{layer}.ffn_sub_norm.weight": f"{_LAYER}.mlp.ffn_sub_norm.weight",
}
"""Names of norms in checkpoints by those in files, which other decoders have not."""


def read_bitnet(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """A decoder that states its activation; where it does not, llama.cpp computes ``activation``.

    Raises `UserError` P532 as `Metadata.read`.
    """
    stated = metadata.read("{arch}.hidden_activation", str, activation)
    return read_decoder(metadata, config, stated)
