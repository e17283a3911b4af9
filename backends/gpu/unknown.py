"""Operators of model documents that the kernels for GPUs do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model


def list_unknown_layers(model: Model) -> list[str]:
    """What they do not have of norms, attention and routing, each as the end of a sentence."""
    attention, moe = model.attention, model.moe
    named = {
        "norm.inputs = false": not model.norm.inputs,
        "attention.clip": attention.clip is not None,
        "attention.growth": attention.growth > 0,
        'attention.head_norm_of = "all"': attention.head_norm_of == "all",
        'attention.head_norm_place = "after"': attention.head_norm_place == "after",
    }
    if moe is not None:
        named['moe.router = "mixer"'] = moe.router == "mixer"
    return [f"does not know {name}" for name, is_there in named.items() if is_there]
