"""What a plan does about the experts of a mixture that its router chose, as far as time depends on
it: those that dials do not read, and gates that are read before neurons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from pi2.arrays import F64
from pi2.costs.activations import Hotness
from pi2.costs.activity import LayerActivity, describe_activity, unite_activity
from pi2.costs.flash import Flash
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.model import Model
from pi2.plan.weights.gates import lay_out_gates

Number = TypeVar("Number", float, F64)

_LONG = 512 * 1024
"""Bytes of a request where an expert's gates are longer."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReads:
    """Gates of chosen experts that are read before their neurons."""

    records: float
    """Experts of a layer whose gates a token reads, on average."""
    record_s: float
    """Seconds of one of them."""
    latency_s: float
    """Until the first of a layer's comes."""
    bytes: int
    """Bytes of the gates of one expert."""
    is_ahead: bool
    """Whether they are read while the layer before is computed; neurons are not."""

    @property
    def seconds(self) -> float:
        """Mean seconds until a layer's gates are there, nothing else going on."""
        return min(self.records, 1.0) * self.latency_s + self.records * self.record_s


def read_gates(resolved: ResolvedPlan, flash: Flash | None, store: Path | None) -> GateReads | None:
    """The gates that a token reads of a layer; None of plans that read none."""
    if not resolved.reads_gates or flash is None:
        return None
    plan, model = resolved.plan, resolved.model
    size = lay_out_gates(resolved.bundle, model.shape.ffn).stride
    least = resolved.needs.predictor.bytes - model.active_experts * size
    slots = max(plan.memory.segments.predictor - least, 0) // size
    share = min(slots / (model.shape.layers * model.expert_count), 1.0)
    (activity, *_), _ = describe_activity(model, "router", store, batch=plan.decode.batch)
    missing = activity.count_missing(0.0, share, plan.cache.policy) / model.shape.ffn
    rate = flash.find_rate_bytes_s("random", min(size, _LONG))
    return GateReads(
        records=missing,
        record_s=size / rate,
        latency_s=flash.latency_s,
        bytes=size,
        is_ahead=plan.decode.look_ahead != "none",
    )


def describe_open_experts(
    resolved: ResolvedPlan, store: Path | None
) -> tuple[tuple[LayerActivity, ...], str]:
    """Activity of each layer of a plan that computes the open neurons of chosen experts: experts
    are used unequally, while the neurons of each are taken to be open equally often."""
    model = resolved.model
    found = []
    (routing, *_), _ = describe_activity(model, "router", store)
    for kept in _list_kept(resolved, model):
        named = Hotness(active=routing.named.active * kept, spread=routing.named.spread)
        activity = LayerActivity(
            named=named,
            chosen=1.0,
            neurons=model.layer_neurons,
            # The last token's experts come again, and of their neurons those that were open.
            again=routing.again * kept,
        )
        found.append(unite_activity(activity, resolved.plan.decode.batch))
    return tuple(found), "published routing of experts, and the plan's thresholds"


def _list_kept(resolved: ResolvedPlan, model: Model) -> list[float]:
    """Share of an expert's neurons that thresholds leave, by layer."""
    if resolved.thresholds is not None:
        return [layer.computed for layer in resolved.thresholds.layers]
    sparsity = resolved.plan.sparsity
    target = 0.0 if sparsity is None or sparsity.target is None else sparsity.target
    return [1.0 - target] * model.shape.layers
