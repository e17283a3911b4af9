"""FFN neurons in float32, from the bytes of their bundles."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.reference.operators import activate
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_factors, unpack_part
from pi2.plan.weights.layout import BundleLayout


def compute_activations(
    model: Model,
    layout: BundleLayout,
    inputs: F32,
    bundles: U8,
    routes: F32 | None = None,
    cutoffs: F32 | None = None,
) -> F32:
    """Activations float32 [T, n] of the neurons of ``bundles`` [n, stride], which have their
    scales, for ``inputs`` [T, hidden]; in a mixture times ``routes`` [T, experts], the weights of
    their experts.  ``cutoffs`` [T, 1] of gates, where the layer has them."""
    values = []
    for index in range(2 if layout.is_gated else 1):
        value = inputs @ unpack_part(bundles, layout, index).T
        values.append(value + slice_bias(bundles, layout, index) if layout.biases else value)
    active = activate(model, values[0], values[1] if layout.is_gated else None, cutoffs)
    if layout.expert_offset is None or routes is None:
        return active
    return np.asarray(active * routes[:, slice_experts(bundles, layout)])


def multiply_down(layout: BundleLayout, active: F32, bundles: U8) -> F32:
    """Sum float32 [T, hidden] of the down columns of ``bundles`` [n, stride], which have their
    scales, times ``active`` [T, n] and the factors of these, where they are normalised later."""
    if layout.factor_offset is not None:
        active = active * slice_factors(bundles, layout)
    return np.asarray(active @ unpack_part(bundles, layout, len(layout.parts) - 1))
