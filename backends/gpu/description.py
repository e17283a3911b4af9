"""Kernels for the neurons of a bundle layout."""

from __future__ import annotations

import dataclasses

from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.sizes import count_experts
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_ffn import Ffn
from pi2.plan.weights.layout import BundleLayout


def describe_model_ffn(layout: BundleLayout, model: Model) -> FfnKernels:
    """Return the kernels for neurons of ``layout`` of a model, in tiles."""
    found = describe_ffn(layout, model.ffn, count_experts(model))
    weighs = model.moe is not None and model.moe.weighs == "input"
    return dataclasses.replace(found, weighs_input=weighs)


def describe_ffn(layout: BundleLayout, ffn: Ffn, experts: int = 0) -> FfnKernels:
    """Return the kernels for neurons of ``layout`` that compute ``ffn``."""
    return FfnKernels(
        hidden=layout.hidden,
        precision=layout.precision,
        activation=ffn.activation,
        threshold=ffn.threshold,
        slope=ffn.slope,
        limit=ffn.limit,
        up_offset=ffn.up_offset,
        gated=layout.is_gated,
        bias=bool(layout.biases),
        experts=experts,
    )
