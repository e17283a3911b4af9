"""Instructions of the index that chooses keys for attention."""

from __future__ import annotations

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.operands import Area, Norm, Product, put_optional
from pi2.backends.blocks.sizes import PARTS
from pi2.model.blocks import Attention
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Index


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
        none = (
            *("value_width", "value_cache", "value_scales", "key_scales", "key_head_stride"),
            *("value_sequence_stride", "value_head_stride"),
        )
        builder.add("keep_index", {**kept, **places, **dict.fromkeys(none, 0)}, each=1)
        del places["key_width"]
        weights = self._weights if self._has_weights else Area(0, 0)
        for kernel, each in (("rank", PARTS), ("choose", 1)):
            builder.add_choosing(
                kernel,
                {
                    "queries": queries.address,
                    "query_stride": index.heads * index.width,
                    **put_optional("weights", weights.address),
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
