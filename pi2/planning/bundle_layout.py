"""How a layer's neurons lie in the store: the choices, and what a store has already.

A direct read begins and ends at the device's blocks, so that the distance (stride) is a multiple of
them.  Flash moves whole pages: neurons that begin anywhere take more pages to read than neurons
that begin with one, but fewer bytes of memory.  Which is better depends on the device and on what
the plan waits for; the planner makes a plan for each.

Neurons without their scales may take whole blocks less.  Then the scales of all of them are in
memory, which is a choice too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pi2.costs.stored import PAGE_BYTES, StoredLayout
from pi2.plan.arithmetic.sizes import DEFAULT_BLOCK_BYTES, find_block_bytes
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import approximate_bytes, approximate_number, format_bytes
from pi2.plan.weights.layout import BundleLayout, ScalesPlace, round_up

MOST_PADDING = 1.25
"""Distance of whole pages over that of blocks from which it is not worth a plan: small neurons."""
LEAST_SAVING = 0.2
"""Part of the distance that has to go with the scales before it is worth a plan.  With a seventh, a
7B with half of its neurons on flash ran no faster (docs/lab/io.md)."""
REWRITE_GAIN = 0.02
"""Share by which a plan must be faster before an existing store is to be rewritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOption:
    """The best plan with a distance of neurons."""

    stride: int
    tokens_s: float
    memory_bytes: int
    scales: ScalesPlace = "inline"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDecision:
    """The distance that was chosen, what others would make, and what the store has."""

    chosen: int
    used_bytes: int
    block_bytes: int
    others: tuple[LayoutOption, ...]
    stored: StoredLayout | None
    store: str
    scales: ScalesPlace = "inline"
    usual_scales: ScalesPlace = "inline"
    """Where a store has them that nothing else was asked of."""
    reads_experts: bool = False
    """Whether neurons of a mixture are read one by one."""


def list_bundles(device: Device, model: Model, stored: StoredLayout | None) -> list[BundleLayout]:
    """Layouts that the device can read: with scales in the bundles, the smallest first; with
    resident ones where that makes bundles smaller by `LEAST_SAVING`, or where the store has
    them."""
    block = find_block_bytes(device)
    strides = _list_strides(device, model, stored)
    used = model.lay_out_bundle(scales="resident").used_bytes
    apart = set[int]()
    if round_up(used, block) <= (1.0 - LEAST_SAVING) * strides[0]:
        apart.add(round_up(used, block))
    if stored is not None and stored.scales == "resident" and stored.stride % block == 0:
        apart.add(stored.stride)
    bundles = [model.lay_out_bundle(stride) for stride in strides]
    if bundles[0].scales == "resident":
        # Stores know no other place for them.
        return bundles
    return bundles + [model.lay_out_bundle(stride, "resident") for stride in sorted(apart)]


def needs_rewriting(bundle: BundleLayout, stored: StoredLayout | None) -> bool:
    """Whether a store has to be written anew to have this layout: one that does not exist yet can
    be given any distance, and has its scales in the bundles, but for mxfp4."""
    if stored is None:
        return bundle.scales == "resident" and bundle.precision != "mxfp4"
    return (bundle.stride, bundle.scales) != (stored.stride, stored.scales)


def _list_strides(device: Device, model: Model, stored: StoredLayout | None) -> list[int]:
    """Distances of bundles with their scales that the device can read, the smallest first."""
    used, block = model.lay_out_bundle().used_bytes, find_block_bytes(device)
    least = round_up(used, block)
    found = {least}
    paged = round_up(used, PAGE_BYTES)
    if paged % block == 0 and paged <= MOST_PADDING * least:
        found.add(paged)
    usual = model.lay_out_bundle().scales
    has = 0 if stored is None or stored.scales != usual else stored.stride
    if has >= used and has % block == 0:
        found.add(has)
    return sorted(found)


def describe_layout(decision: LayoutDecision) -> Iterator[str]:
    """The choice with its reason, and how a store comes to have it."""
    chosen, block = decision.chosen, decision.block_bytes
    stored = decision.stored
    why = f"the least multiple of the device's {format_bytes(block)} blocks"
    if chosen % PAGE_BYTES == 0 and block < PAGE_BYTES:
        why = "whole pages of flash"
    if stored is not None and (stored.stride, stored.scales) == (chosen, decision.scales):
        why += ", as in the store"
    without = "" if decision.scales == "inline" else " Their scales are apart, in memory."
    yield (
        f"Bundles: neurons lie {format_bytes(chosen)} apart, {decision.used_bytes} bytes are used: "
        f"{why}.{without}"
    )
    if decision.others:
        shown = "; ".join(
            f"{format_bytes(item.stride)} apart{_name_scales(item.scales)} makes "
            f"{approximate_number(item.tokens_s)} tokens/s in "
            f"{approximate_bytes(item.memory_bytes)}"
            for item in decision.others
        )
        yield f"The best plan with neurons {shown}."
    usual = round_up(decision.used_bytes, DEFAULT_BLOCK_BYTES)
    has = usual if stored is None else stored.stride
    scales = decision.usual_scales if stored is None else stored.scales
    if scales != decision.scales:
        who = "`pi2 convert` leaves scales" if stored is None else "The store has its scales"
        place = "in the bundles" if scales == "inline" else "in files of their own"
        yield (
            f"{who} {place}: `pi2 store repack {decision.store} --scales {decision.scales} "
            f"--stride '{format_bytes(chosen)}'` changes that."
        )
    elif has != chosen:
        who = "`pi2 convert` puts them" if stored is None else "The store has them"
        yield (
            f"{who} {format_bytes(has)} apart: `pi2 store repack {decision.store} --stride "
            f"'{format_bytes(chosen)}'` changes that."
        )
    if stored is not None and stored.order == "index":
        yield (
            "The store's neurons lie as in the checkpoint, hot or not: `pi2 store reorder "
            f"{decision.store} --by hotness --statistics STATS` puts the most active ones first."
        )
    if stored is not None and stored.order == "hotness" and decision.reads_experts:
        yield (
            "In the store the experts lie mixed: `pi2 store reorder "
            f"{decision.store} --by expert` puts each expert's neurons together, so that what a "
            "token misses takes fewer reads."
        )


def _name_scales(scales: ScalesPlace) -> str:
    return " with scales in memory" if scales == "resident" else ""
