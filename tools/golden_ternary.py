"""Golden models with ternary weights, packed as BitNet publishes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.bitnet import pack_weights

QUANTIZATION: dict[str, Any] = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
}
"""What the configuration of such a checkpoint states: numbers are codes times scales.  Their code
also rounds activations to 8 bits, which goldens leave out."""


def round_projections(model: nn.Module) -> None:
    """Round the matrices of all layers to -1, 0 and 1 times their mean magnitude, which fits into
    fp16."""
    for name, values in model.named_parameters():
        if values.dim() == 2 and ".layers." in name:
            scale = values.abs().mean().half().float()
            values.copy_((values / scale).round().clamp(-1, 1) * scale)


def pack_projections(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, its ternary matrices as codes and scales."""
    packed = {}
    for name, values in tensors.items():
        if values.dim() != 2 or ".layers." not in name:
            packed[name] = values
            continue
        scale = values.abs().max()
        packed[name] = pack_weights((values / scale).round())
        packed[f"{name}_scale"] = scale.reshape(1)
    return packed
