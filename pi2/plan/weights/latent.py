"""Sizes of latent attention, for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Widths of latent attention's vectors, as model documents have them."""

    rank: int
    """Elements of what keys and values are made of."""
    query_rank: int | None
    """Elements of what queries are made of; None where they are projected at once."""
    plain: int
    """Elements of a head's query that are not rotated."""
    rotated: int
    epsilon: float
    """Epsilon of the norms of what keys, values and queries are made of."""
    gates: int = 0
    """Gates of what heads have mixed, one for each, or none."""

    @property
    def key(self) -> int:
        """Elements of a head's query."""
        return self.plain + self.rotated

    @property
    def kept(self) -> int:
        """Elements that are kept of a token."""
        return self.rank + self.rotated

    def count_rows(self, heads: int) -> int:
        """Rows of the projection that all of it comes from: queries or what they are made of,
        gates, and what is kept."""
        return (self.query_rank or heads * self.key) + self.gates + self.kept


def describe_latent(model: Model) -> LatentShape | None:
    """The shape of a model's latent attention, if it has any."""
    latent = model.attention.latent
    if latent is None:
        return None
    return LatentShape(
        rank=latent.rank,
        query_rank=latent.query_rank,
        plain=latent.plain,
        rotated=latent.rotated,
        epsilon=latent.epsilon,
        gates=model.shape.heads if model.attention.output_gate else 0,
    )
