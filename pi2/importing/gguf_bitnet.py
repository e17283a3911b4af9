"""BitNet in GGUF files, whose matrices may have a scale in a tensor of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pi2.importing.decoded_tensor import refuse_shape
from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.packed_tensor import PackedTensor
from pi2.importing.safetensors_file import SourceTensor

_LAYER = "model.layers.{layer}"
_MATRICES = {
    "attn_q": f"{_LAYER}.self_attn.q_proj",
    "attn_k": f"{_LAYER}.self_attn.k_proj",
    "attn_v": f"{_LAYER}.self_attn.v_proj",
    "attn_output": f"{_LAYER}.self_attn.o_proj",
    "ffn_gate": f"{_LAYER}.mlp.gate_proj",
    "ffn_up": f"{_LAYER}.mlp.up_proj",
    "ffn_down": f"{_LAYER}.mlp.down_proj",
}
_SCALE = ".weight_scale"
BITNET_NAMES = {
    "blk.{layer}.attn_sub_norm.weight": f"{_LAYER}.self_attn.attn_sub_norm.weight",
    "blk.{layer}.ffn_sub_norm.weight": f"{_LAYER}.mlp.ffn_sub_norm.weight",
    **{
        f"blk.{{layer}}.{name}.scale": f"{original}{_SCALE}" for name, original in _MATRICES.items()
    },
}
"""Names of norms and scales in checkpoints by those in files, which other decoders have not."""


def read_bitnet(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """A decoder that states its activation; where it does not, llama.cpp computes ``activation``.

    Raises `UserError` P532 as `Metadata.read`.
    """
    stated = metadata.read("{arch}.hidden_activation", str, activation)
    return read_decoder(metadata, config, stated)


def complete_bitnet(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    """Multiply matrices with their scales, where these are tensors of their own; ``config`` stays
    as it is.

    Raises `UserError` P534 for a scale that is more than one number.
    """
    del config
    for name in [name for name in tensors if name.endswith(_SCALE)]:
        scale = tensors.pop(name)
        matrix = tensors.get(name.removesuffix("_scale"))
        if int(np.prod(scale.shape)) != 1:
            raise refuse_shape(scale, (1,))
        if matrix is not None:  # what is missing is said later
            assert isinstance(matrix, PackedTensor)
            factors = scale.read().reshape(1)
            tensors[name.removesuffix("_scale")] = replace(matrix, factors=factors)
