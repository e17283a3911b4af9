"""Latent attention (DeepSeek V2): the tensors that queries, keys and values are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pi2.formats.packing import fill_groups
from pi2.model.tensor import DenseTensor, Order, Place, Source, fill, list_head_rows

if TYPE_CHECKING:
    from pi2.model.attention import Attention
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_mixing import Latent


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Widths of latent attention's vectors, from which kernels are made."""

    rank: int
    """Elements of what keys and values are made of."""
    query_rank: int | None
    """Elements of what queries are made of; None if they are projected at once."""
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


def list_latent_projected(
    at: Place, own: Attention, suffix: str, *columns: int
) -> Iterator[Source]:
    """Rows of ``qkv``: queries or what they are made of, gates of heads, what keys and values are
    made of, the rotated key; or their biases, of which queries and gates have none."""
    latent = own.latent
    assert latent is not None
    queries, kept = own.heads * latent.key, _order_kept(own, latent)
    if latent.query_rank is not None:
        yield at.take(f"latent_query{suffix}", latent.query_rank, *columns)
    else:
        query = at.take("query", queries, *columns, rows=_order_queries(own, latent))
        yield fill(queries) if suffix else query
    if own.options.output_gate:
        yield fill(own.heads) if suffix else at.take("query_gate", own.heads, *columns)
    yield at.take(f"latent{suffix}", latent.kept, *columns, rows=kept)


def list_latent_tensors(at: Place, own: Attention, latent: Latent) -> Iterator[DenseTensor]:
    """``latent_query_norm`` and ``latent_norm``; ``latent_query_out`` [heads (plain + rotated),
    query_rank], which gives queries; ``latent_key`` [heads rank, plain], which turns the plain part
    of a query into one of what keys are made of; ``latent_value`` [heads head_dim, rank], which
    turns what a head has mixed of that into its value."""
    rank, heads = latent.query_rank, own.heads
    if rank is not None:
        yield at.vector("latent_query_norm", fill_groups(rank), at.take("latent_query_norm", rank))
    yield at.vector("latent_norm", latent.rank, at.take("latent_norm", latent.rank))
    if rank is not None:
        rows = heads * latent.key
        made = at.take("latent_query_out", rows, rank, rows=_order_queries(own, latent))
        yield at.matrix("latent_query_out", rows, fill_groups(rank), made)
    # Each head has the rows of its keys first.
    size = latent.plain + own.head_dim
    whole = (heads * size, latent.rank)
    keys = at.take("latent_out", *whole)
    yield at.matrix(
        "latent_key", heads * latent.rank, fill_groups(latent.plain), keys, transform="turned keys"
    )
    values = partial(list_head_rows, heads, size, range(latent.plain, size))
    source = at.take("latent_out", *whole, rows=values)
    yield at.matrix("latent_value", own.query, fill_groups(latent.rank), source)


def _order_queries(own: Attention, latent: Latent) -> Order | None:
    order = own.head_order
    if order is None:
        return None
    inside = [*range(latent.plain), *(latent.plain + place for place in order)]
    return partial(list_head_rows, own.heads, latent.key, inside)


def _order_kept(own: Attention, latent: Latent) -> Order | None:
    order = own.head_order
    if order is None:
        return None
    return lambda: [*range(latent.rank), *(latent.rank + place for place in order)]
