"""The order in which the FFN's sum is kept while neurons are added to it."""

from __future__ import annotations

import numpy as np

from pi2.arrays import I32
from pi2.plan.weights.layout import GROUP, Precision, split_lanes


def order_by_lanes(hidden: int, precision: Precision) -> I32 | None:
    """Elements [hidden] in *lane order* (`pi2.backends.kernels.neurons`): where each stands in the
    natural order; None where that is the same."""
    if precision == "fp16":
        return None
    blocks, first = [], 0
    for lanes in split_lanes(hidden):
        elements = np.arange(first, first + lanes * GROUP, dtype=np.int32).reshape(lanes, GROUP)
        # Within a block, element e of all its groups comes before element e + 1 of any.
        blocks.append(elements.T.reshape(-1))
        first += lanes * GROUP
    return np.concatenate(blocks)
