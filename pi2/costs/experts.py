"""What a plan does about the experts of a mixture that its router chose, as far as time depends on
it: those that dials do not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pi2.arrays import F64
from pi2.plan.arithmetic.resolved import ResolvedPlan

Number = TypeVar("Number", float, F64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Most experts that a layer reads for a token, by the table ``[experts]``."""

    read_best: float
    """Part of a token's experts that are read where they are missing, the mean of all layers:
    misses are taken to fall on all ranks alike."""
    most_reads: float

    def limit(self, missing: Number) -> Number:
        """Experts that are read of ``missing`` ones."""
        kept = np.minimum(np.asarray(missing) * self.read_best, self.most_reads)
        return kept if isinstance(missing, np.ndarray) else float(kept)


def read_limits(resolved: ResolvedPlan) -> ReadLimits | None:
    """The plan's limits of reads; None where all chosen experts are read.  What ``least_weight``
    and ``prefer_cached`` save depends on the router's weights, of which nothing is known."""
    plan, model = resolved.plan, resolved.model
    if model.moe is None or plan.decode.predictor != "router":
        return None
    best, most = plan.experts.list_read_best(model.shape.layers), plan.experts.most_reads
    if most is None and not any(number is not None for number in best):
        return None
    chosen = model.moe.active_experts
    parts = [1.0 if number is None else min(number / chosen, 1.0) for number in best]
    return ReadLimits(
        read_best=sum(parts) / len(parts),
        most_reads=float(chosen if most is None else most),
    )
