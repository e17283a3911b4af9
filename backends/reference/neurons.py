"""FFN neurons in float32, from the bytes of their bundles."""

from __future__ import annotations

from collections.abc import Sequence

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
    if layout.expert_offset is None or routes is None:
        return activate(model, values[0], values[1] if layout.is_gated else None, cutoffs)
    return weigh_activations(model, values, routes[:, slice_experts(bundles, layout)], cutoffs)


def weigh_activations(
    model: Model, values: Sequence[F32], weights: F32, cutoffs: F32 | None = None
) -> F32:
    """Activations float32 [T, n] of experts' neurons, of whose gates and ups, or ups alone, these
    are the ``values`` [T, n], and ``weights`` [T, n] those of the experts."""
    is_input = model.moe is not None and model.moe.weighs == "input"
    gate, *up = [value * weights for value in values] if is_input else values
    active = activate(model, gate, up[0] if up else None, cutoffs)
    return active if is_input else np.asarray(active * weights)


def multiply_down(layout: BundleLayout, active: F32, bundles: U8) -> F32:
    """Sum float32 [T, hidden] of the down columns of ``bundles`` [n, stride], which have their
    scales, times ``active`` [T, n] and the factors of these, where they are normalised later."""
    if layout.factor_offset is not None:
        active = active * slice_factors(bundles, layout)
    return np.asarray(active @ unpack_part(bundles, layout, len(layout.parts) - 1))
