"""How a store's neurons lie, as far as times of reads depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import ScalesPlace
from pi2.store.manifest import Order, read_manifest

PAGE_BYTES = 4096
"""Least number of bytes that flash reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayout:
    """Bundle layout of an existing neuron store."""

    stride: int
    order: Order
    scales: ScalesPlace = "inline"


def read_stored(store: Path | None) -> StoredLayout | None:
    """Layout of a store; None where there is none, or one that cannot be read."""
    if store is None:
        return None
    try:
        manifest = read_manifest(store)
    except UserError:
        return None
    return StoredLayout(
        stride=manifest.bundle.stride, order=manifest.order, scales=manifest.bundle.scales
    )


def find_range_bytes(model: Model, stride: int, store: Path | None = None) -> int:
    """Stretch of the file that reads of a token's neurons fall into: a layer, of a mixture the
    neurons of one expert, unless a store has them in another order."""
    stored = read_stored(store) if model.moe is not None else None
    apart = stored is not None and stored.order != "expert"
    return (model.layer_neurons if apart else model.shape.ffn) * stride


def find_touched_bytes(stride: int) -> float:
    """Mean bytes of the pages that a neuron's read touches, over all neurons of a layer."""
    step = gcd(stride, PAGE_BYTES)
    count = PAGE_BYTES // step
    pages = sum(-(-(start * step + stride) // PAGE_BYTES) for start in range(count))
    return pages * PAGE_BYTES / count
