"""All splits of a plan, with their places: for the rules about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pi2.plan.documents.plan import Plan
from pi2.plan.documents.plan_units import BatchSplit
from pi2.plan.toml.paths import KeyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSplit:
    """A split, and where it stands."""

    split: Mapping[str, float]
    path: KeyPath
    subject: str
    """Which layers, and which steps, for people."""


def list_placed_splits(plan: Plan) -> Iterator[PlacedSplit]:
    """Every split of a plan, in the order of the document."""
    layers = plan.layers
    base: KeyPath = ("layers",)
    yield PlacedSplit(split=layers.split, path=(*base, "split"), subject="all layers")
    yield from _list_batches(layers.batches, base, "all layers")
    for number, override in enumerate(layers.overrides):
        path: KeyPath = (*base, "overrides", number)
        subject = f'layers "{override.select.strip()}"'
        if override.split is not None:
            yield PlacedSplit(split=override.split, path=(*path, "split"), subject=subject)
        yield from _list_batches(override.batches or (), path, subject)


def list_row_splits(plan: Plan) -> Iterator[PlacedSplit]:
    """Every split of rows of matrices."""
    table = plan.projections
    for name, split in (("attention", table.attention), ("head", table.head)):
        if split is not None:
            path: KeyPath = ("projections", name)
            yield PlacedSplit(split=split, path=path, subject=f"projections.{name}")


def _list_batches(
    batches: Sequence[BatchSplit], path: KeyPath, subject: str
) -> Iterator[PlacedSplit]:
    for number, entry in enumerate(batches):
        yield PlacedSplit(
            split=entry.split,
            path=(*path, "batches", number, "split"),
            subject=f"{subject} in steps of {entry.sequences} sequences",
        )
