"""A resolved plan: plan, device and model put together, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pi2.plan.arithmetic.sizes import Needs, compute_needs
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.selectors import list_layers
from pi2.plan.toml.paths import KeyPath
from pi2.plan.weights.layout import GROUP, BundleLayout, round_up

if TYPE_CHECKING:
    from pi2.plan.reading.thresholds import Thresholds


@dataclass(frozen=True, kw_only=True)
class ResolvedLayer:
    """Settings of one layer, and the key path in the plan that set each of them."""

    split: Mapping[str, float]
    """Share of the layer's neurons by unit."""
    hot: float
    """Share of the layer's neurons that stay resident."""
    hot_neurons: int
    """Number of the layer's neurons that stay resident: the first ones in stored order."""
    split_path: KeyPath
    hot_path: KeyPath


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """A plan with its device and its model: what rules, arithmetic and a run work with."""

    plan: Plan
    device: Device
    model: Model
    path: Path = Path()
    """The plan's file; empty for values that no file holds yet."""
    thresholds: Thresholds | None = None
    """What ``[sparsity]`` names, if the plan has it."""

    @property
    def store_path(self) -> Path:
        """The neuron store's folder."""
        return self.path.parent / self.plan.store

    @cached_property
    def layers(self) -> tuple[ResolvedLayer, ...]:
        """Settings of every layer, the first one first."""
        return resolve_layers(self.plan, self.model)

    @cached_property
    def bundle(self) -> BundleLayout:
        """How the weights of a neuron lie in the store."""
        return lay_out_plan_bundle(self.plan, self.model)

    @cached_property
    def needs(self) -> Needs:
        """Bytes that each segment needs."""
        return compute_needs(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256, hexadecimal, of the canonical JSON of plan, device and model."""
        # Checking many plans needs no digests, and they take a tenth of the time.
        from pi2.plan.arithmetic.digest import compute_digest

        return compute_digest(self)


def has_packable_shape(model: Model) -> bool:
    """Whether predictors fill groups, without which no size can be computed."""
    return model.predictor is None or model.predictor.rank % GROUP == 0


def resolve_layers(plan: Plan, model: Model) -> tuple[ResolvedLayer, ...]:
    """Expand ``[layers]`` and its overrides to one entry per layer; a later override wins."""
    count = model.shape.layers
    base = plan.layers
    splits = [(base.split, _path("layers", "split"))] * count
    hots = [(base.hot, _path("layers", "hot"))] * count
    for number, override in enumerate(base.overrides):
        for layer in list_layers(override.select, count):
            if override.split is not None:
                splits[layer] = (override.split, _path("layers", "overrides", number, "split"))
            if override.hot is not None:
                hots[layer] = (override.hot, _path("layers", "overrides", number, "hot"))
    return tuple(
        ResolvedLayer(
            split=MappingProxyType(split),
            hot=hot,
            hot_neurons=round(hot * model.layer_neurons),
            split_path=split_path,
            hot_path=hot_path,
        )
        for (split, split_path), (hot, hot_path) in zip(splits, hots, strict=True)
    )


def _path(*parts: str | int) -> KeyPath:
    return parts


def lay_out_plan_bundle(plan: Plan, model: Model) -> BundleLayout:
    """The plan's bundle; a stride that is too small counts as the smallest that is not."""
    layout = model.lay_out_bundle(scales=plan.bundle.scales)
    stride = max(plan.bundle.stride, round_up(layout.used_bytes, 512))
    if plan.bundle.stride >= layout.used_bytes:
        stride = plan.bundle.stride
    return model.lay_out_bundle(stride, plan.bundle.scales)
