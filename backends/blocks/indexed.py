"""Attention whose keys are chosen by an index, pooled from blocks, or made of latent vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.operands import Area, Norm, Product
from pi2.backends.blocks.sizes import PARTS, count_pooled_rows
from pi2.model.blocks import Attention
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Index, Latent, Pooled

if TYPE_CHECKING:
    from pi2.arrays import I32


class Indexing:
    """Adds what layers with an index of their own choose; other layers have nothing of it."""

    def __init__(self, model: Model, builder: Builder, index: Index) -> None:
        self._model, self._builder, self._index = model, builder, index
        update = {"kind": "layernorm", "bias": True, "epsilon": index.epsilon, "weight_offset": 0.0}
        self._norm = model.norm.model_copy(update=update)
        self._has_weights = index.kind == "tokens"

    def list_inputs(self, layer: int, own: Attention) -> list[Product]:
        """Return the products of the layer's input."""
        if own.chooses != "index":
            return []
        other = ("index_weights", self._weights) if self._has_weights else self._query
        pairs = (("index_key", self._keys), other)
        return [self._builder.make_product(key, layer, area) for key, area in pairs]

    def list_made(self, layer: int, own: Attention) -> list[Product]:
        """Return the products of the vector that queries are made of."""
        if own.chooses != "index" or not self._has_weights:
            return []
        return [self._builder.make_product(self._query[0], layer, self._query[1])]

    @property
    def _query(self) -> tuple[str, Area]:
        size = self._index.heads * self._index.width
        return "index_query", self._builder.take_area("index queries", size, is_tight=True)

    @property
    def _keys(self) -> Area:
        return self._builder.take_area("index keys", self._index.width)

    @property
    def _weights(self) -> Area:
        return self._builder.take_area("index weights", self._index.heads)

    def add(self, layer: int, own: Attention) -> None:
        """Add the choice, after the products."""
        if own.chooses != "index":
            return
        builder, index = self._builder, self._index
        queries, keys, norms = self._query[1], self._keys, [Norm(0, "none"), Norm(0, "none")]
        if self._has_weights:
            builder.add_norm("index_key_norm", keys, keys, index.width, norm=self._norm)
        else:
            offset = self._model.norm.weight_offset
            names = ("index_query_norm", "index_key_norm")
            norms = [Norm(builder.read_vector(name, layer, offset), "before") for name in names]
        neighbours = int(index.pairs == "neighbours")
        for x, heads, norm in ((queries, index.heads, norms[0]), (keys, 1, norms[1])):
            builder.add_part_turn(x, heads, index.width, own, norm, neighbours=neighbours)
        places = builder.place_index(layer, index.width)
        kept = {"keys": keys.address, "values": keys.address, "x_stride": keys.stride, "heads": 1}
        builder.add("keep_index", kept | places, each=1)
        del places["key_width"]
        weights = self._weights if self._has_weights else Area(0, 0)
        for kernel, each in (("rank", PARTS), ("choose", 1)):
            builder.add_choosing(
                kernel,
                {
                    "queries": queries.address,
                    "query_stride": index.heads * index.width,
                    "weights": weights.address,
                    "weights_stride": weights.stride,
                    "heads": index.heads,
                    "width": index.width,
                    **places,
                    "count": index.chosen,
                    "block": index.block,
                    "local": index.local,
                },
                index,
                each=each,
            )


class PooledAttention:
    """Adds `pi2.plan.documents.model_mixing.Pooled` to a program."""

    def __init__(self, model: Model, builder: Builder, pooled: Pooled) -> None:
        self._hidden, self._builder, self._pooled = model.shape.hidden, builder, pooled
        self._starts, self._rows = (self._take_numbers() for _ in range(2))
        """Position of the first token of a token's block, and place of the vector that ends."""

    def _take_numbers(self) -> int:
        numbers: I32 = self._builder.take("int32", self._builder.extent.tokens)
        return numbers.ctypes.data

    def add(self, layer: int, own: Attention, read: Area) -> Area:
        """Add attention to ``read``; return the outputs of groups of heads."""
        builder, pooled, heads, width = self._builder, self._pooled, own.heads, own.head_dim
        queries = builder.take_area("queries", own.query, is_tight=True)
        vectors = builder.take_area("vectors", width)
        made = builder.take_area("query vectors", pooled.query_rank)
        pairs = [("latent_query", made), ("latent", vectors)]
        if own.block:
            parts = builder.take_area("pooled parts", 2 * own.pool_width)
            pairs += [("pool_values", parts), ("pool_gates", parts.skip(own.pool_width))]
        products = [builder.make_product(key, layer, y) for key, y in pairs]
        builder.add_products(read, self._hidden, products)
        builder.add_norm("latent_query_norm", made, made, pooled.query_rank, norm=builder.rms)
        builder.add_product(made, pooled.query_rank, "latent_query_out", layer, queries)
        builder.add_parts_norm(queries, heads, width)
        builder.add_norm("latent_norm", vectors, vectors, width, norm=builder.rms)
        self._turn(queries, heads, own)
        self._turn(vectors, 1, own)
        builder.add_keep(vectors, None, own, layer)
        if own.block:
            self._add_pooled(layer, own, parts)
        mixed = builder.take_area("mixed", own.query, is_tight=True)
        builder.add_attention(queries, mixed, own, layer)
        self._turn(mixed, heads, own, swapped=1)
        given = builder.take_area("groups give", own.given, is_tight=True)
        each = own.query // pooled.groups
        product = builder.make_product(
            "output_group", layer, Area(given.address, pooled.output_rank)
        )
        builder.add_heads(Area(mixed.address, each), each, product, pooled.groups)
        return given

    def _turn(self, x: Area, heads: int, own: Attention, **more: int) -> None:
        """Turn the last elements of heads."""
        x, more["neighbours"] = x.skip(own.head_dim - own.turned_width), 1
        self._builder.add_part_turn(x, heads, own.head_dim, own, Norm(0, "none"), **more)

    def _add_pooled(self, layer: int, own: Attention, parts: Area) -> None:
        """Add the vectors of blocks that the call's tokens end, and lists of visible places."""
        builder, context, width = self._builder, self._builder.extent.positions, own.head_dim
        memory = dict[str, int]()
        if builder.is_real:
            array = builder.cache.pools[layer][1]
            stride = array.strides[0] // array.itemsize
            memory = {"memory": array.ctypes.data, "sequence_stride": stride}
            memory |= {"ring": array.shape[2], **builder.put_tokens()}
        builder.add("record", {**parts.put("x"), "length": 2 * own.pool_width, **memory}, each=1)
        vectors = builder.take_area("pooled vectors", width)
        values = {
            **memory,
            "width": width,
            "block": own.block,
            "overlaps": int(own.overlaps),
            "bias": builder.read_vector("pool_bias", layer),
            **vectors.put("y"),
            "starts": self._starts,
            "rows": self._rows,
            "base": context,
            "spare": context + count_pooled_rows(own, context) - 1,
        }
        builder.add("pool", values, each=1)
        builder.add_norm("pool_norm", vectors, vectors, width, norm=builder.rms)
        self._turn(vectors, 1, own, positions=self._starts)
        builder.add_keep(vectors, None, own, layer, self._rows)
        seen = {key: builder.put_seen(own)[key] for key in ("chosen", "list_stride")}
        seen |= {"window": own.window or context, "block": own.block, "base": context}
        builder.add("see", seen | {"positions": builder.positions.ctypes.data}, each=1)


class LatentAttention:
    """The KV cache has a short vector of each token, of which keys and values of all heads are
    made.  A head's query is turned into such a vector instead, and its mix into its value."""

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
        if own.gates:
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
        if own.gates:
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
