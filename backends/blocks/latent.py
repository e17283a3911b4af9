"""Latent attention: the KV cache has a short vector of each token, of which keys and values of all
heads are made.  A head's query is turned into such a vector instead, and its mix into its value."""

from __future__ import annotations

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.indexed import Indexing
from pi2.backends.blocks.operands import Area, Product
from pi2.model.blocks import Attention
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Latent


class LatentAttention:
    def __init__(self, model: Model, builder: Builder, latent: Latent) -> None:
        self._hidden, self._builder, self._latent = model.shape.hidden, builder, latent
        index = model.attention.index
        self._index = None if index is None else Indexing(model, builder, index)
        self._norm = builder.rms.model_copy(update={"epsilon": latent.epsilon})

    def add(self, layer: int, own: Attention, read: Area) -> Area:
        """Add what attention makes of ``read``; return the values of all heads."""
        builder, latent, heads = self._builder, self._latent, own.heads
        key, kept, rank = latent.key, latent.kept, latent.rank
        queries = builder.take_area("latent queries", heads * key, is_tight=True)
        vectors = builder.take_area("latent vectors", kept)
        gates = builder.take_area("head gates", heads, is_tight=True)
        self._add_inputs(layer, own, read, (queries, vectors, gates))
        if self._index is not None:
            self._index.add(layer, own)
        builder.add_growth(queries, heads * key, layer)
        # Heads with their own strides.
        plain = Area(queries.address, key)
        area = builder.take_area("absorbed queries", heads * kept, is_tight=True)
        absorbed = Area(area.address, kept)
        is_whole = builder.find("latent_keys", layer) is None
        if is_whole:
            # Older files have keys as rows of one matrix with values.
            out = self._make("latent_out", layer, absorbed)
            builder.add_turned_heads(plain, latent.plain, out, heads)
        else:
            out = self._make("latent_keys", layer, absorbed)
            builder.add_heads(plain, latent.plain, out, heads)
        if latent.rotated:
            builder.add_cap(
                plain.skip(latent.plain), latent.rotated, 0.0, 1.0, absorbed.skip(rank), each=heads
            )
            neighbours = own.rope.pairs == "neighbours"
            for x, count in ((area, heads), (vectors, 1)):
                builder.add_turn(
                    *(x.skip(rank), count, own, ""),
                    neighbours=neighbours,
                    waits=count == 1,
                    width=kept,
                )
        builder.add_keep(vectors, None, own, layer)
        mixed = builder.take_area("latent mix", heads * rank, is_tight=True)
        builder.add_attention(area, mixed, own, layer)
        values = builder.take_area("mixed", own.query, is_tight=True)
        each = Area(values.address, own.head_dim)
        out = self._make("latent_out" if is_whole else "latent_values", layer, each)
        first = latent.plain if is_whole else 0
        builder.add_heads(Area(mixed.address, rank), rank, out, heads, first)
        if own.options.output_gate:
            builder.add_weighing(each, own.head_dim, Area(gates.address, 1), each=heads)
        return values

    def _make(self, key: str, layer: int, y: Area) -> Product:
        return self._builder.make_product(key, layer, y)

    def _add_inputs(
        self, layer: int, own: Attention, read: Area, outputs: tuple[Area, Area, Area]
    ) -> None:
        """Add projections to queries, latent vectors with the rotated keys, and gates of heads."""
        builder, latent = self._builder, self._latent
        queries, vectors, gates = outputs
        rank = latent.query_rank
        made = queries if rank is None else builder.take_area("query vectors", rank)
        name, has_bias = "query" if rank is None else "latent_query", latent.bias
        products = [
            builder.make_product(name, layer, made, has_bias and rank is not None),
            builder.make_product("latent", layer, vectors, has_bias),
        ]
        if own.options.output_gate:
            products.append(self._make("query_gate", layer, gates))
        made_products = []
        if self._index is not None:
            products += self._index.list_inputs(layer, own)
            made_products = self._index.list_made(layer, own)
        builder.add_products(read, self._hidden, products)
        builder.add_norm("latent_norm", vectors, vectors, latent.rank, norm=self._norm)
        if rank is not None:
            builder.add_norm("latent_query_norm", made, made, rank, norm=self._norm)
            made_products.append(self._make("latent_query_out", layer, queries))
            builder.add_products(made, rank, made_products)
