"""Kernels for the neurons of a bundle layout."""

from __future__ import annotations

from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.plan.documents.model import Activation
from pi2.plan.weights.layout import BundleLayout


def describe_ffn(
    layout: BundleLayout, activation: Activation, threshold: float = 0.0, experts: int = 0
) -> FfnKernels:
    """Return the kernels for neurons of ``layout``."""
    return FfnKernels(
        hidden=layout.hidden,
        precision=layout.precision,
        activation=activation,
        threshold=threshold,
        gated=layout.is_gated,
        bias=bool(layout.biases),
        experts=experts,
    )
