"""What the layers of a model are, as instructions."""

from __future__ import annotations

from pi2.backends.blocks.building import Area, Builder, Product
from pi2.backends.blocks.weights import Weight
from pi2.plan.documents.model import Model


class Layers:
    """Adds a model's embedding, layers and head to a program."""

    def __init__(self, model: Model, builder: Builder, rows: int) -> None:
        """``rows``: most tokens whose logits are computed in a call."""
        self._model = model
        self._builder = builder
        self._hidden = model.shape.hidden
        self.x = builder.take_area("x", self._hidden)
        """The residual stream."""
        self.u = builder.take_area("u", self._hidden)
        self.logits = builder.take_area("logits", model.shape.vocab)

    def add_embedding(self) -> None:
        """Begin the residual stream."""
        weight = self._need("embedding", None)
        self._builder.add_rows(weight, self.x, self._model.multipliers.embedding)

    def add_layer(self, layer: int) -> None:
        """Add attention and the FFN."""
        builder, model = self._builder, self._model
        builder.layer = layer
        read = self._normalize("attention_norm", self.u)
        is_parallel = model.residual == "parallel"
        if is_parallel:
            # Both read the layer's input, and attention changes it.
            other = read
            if model.norm.inputs and self._find("ffn_norm", layer) is not None:
                other = self._normalize("ffn_norm", builder.take_area("v", self._hidden))
        self._add_attention(layer, read)
        if not is_parallel:
            other = self._normalize("ffn_norm", self.u)
        self._add_ffn(layer, other)
        builder.layer = None

    def add_head(self) -> int:
        """Add the last norm and the head; return the number of the first instruction."""
        builder, model = self._builder, self._model
        first = len(builder.instructions)
        builder.add_norm("final_norm", self.x, self.u, self._hidden, has_weights=model.norm.weights)
        weight = self._need("embedding" if model.tied_head else "head", None)
        bias = builder.read_vector("head_bias", None) if model.head_bias else 0
        head = Product(key="head", weight=weight, y=self.logits, bias=bias)
        builder.add_products(self.u, self._hidden, [head])
        limit, factor = model.logit_softcap or 0.0, model.multipliers.logits
        if limit or factor != 1.0:
            builder.add_cap(self.logits, model.shape.vocab, limit, factor)
        return first

    def _find(self, key: str, layer: int | None) -> Weight | None:
        return self._builder.find(key, layer)

    def _need(self, key: str, layer: int | None) -> Weight:
        weight = self._find(key, layer)
        assert weight is not None, f"the source has no tensor {key} of layer {layer}"
        return weight

    def _normalize(self, key: str, target: Area) -> Area:
        """Return what attention or the FFN reads."""
        norm = self._model.norm
        if not norm.inputs:
            return self.x
        self._builder.add_norm(key, self.x, target, self._hidden, has_weights=norm.weights)
        return target

    def _add_output(
        self, key: str, norm: str, source: Area, length: int, layer: int, bias: int
    ) -> None:
        """Add what a matrix makes of ``source`` to the residual stream."""
        builder, weight = self._builder, self._need(key, layer)
        factor = self._model.multipliers.residual
        if not self._model.norm.outputs:
            own = Product(key=key, weight=weight, y=self.x, bias=bias, added=True, factor=factor)
            builder.add_products(source, length, [own])
            return
        given = builder.take_area("given", self._hidden)
        own = Product(key=key, weight=weight, y=given, bias=bias)
        builder.add_products(source, length, [own])
        builder.add_norm(norm, given, self.x, self._hidden, added=True)

    def _add_attention(self, layer: int, read: Area) -> None:
        builder, model = self._builder, self._model
        view, attention = model.view_layer(layer), model.attention
        shape = view.shape
        query, keys = shape.query, shape.kv_heads * shape.head_dim
        projected = builder.take_area("qkv", query + 2 * keys)
        areas = {
            "query": projected,
            "key": projected.skip(query),
            "value": projected.skip(query + keys),
        }
        fused = self._find("fused_qkv", layer) if model.tensors.fused_qkv is not None else None
        if fused is not None:
            bias = builder.read_vector("fused_qkv_bias", layer) if attention.qkv_bias else 0
            products = [Product(key="fused_qkv", weight=fused, y=projected, bias=bias)]
            neighbours = fused.neighbours
        else:
            kinds = ("query", "key", "value") if view.has_keys else ("query",)
            products = [
                Product(
                    key=kind,
                    weight=self._need(kind, layer),
                    y=areas[kind],
                    bias=builder.read_vector(f"{kind}_bias", layer) if attention.qkv_bias else 0,
                )
                for kind in kinds
            ]
            neighbours = products[0].weight.neighbours
        builder.add_products(read, self._hidden, products)
        neighbours = neighbours or model.find_rope(layer).pairs == "neighbours"
        norms = [("query", "query_norm", query, shape.heads)]
        if view.has_keys:
            norms.append(("key", "key_norm", keys, shape.kv_heads))
        if model.has_head_norm(layer) and attention.head_norm_of == "all":
            for kind, norm, width, _ in norms:
                builder.add_norm(norm, areas[kind], areas[kind], width, is_rms=True)
        for place, (kind, norm, _, heads) in enumerate(norms):
            builder.add_turn(
                areas[kind],
                heads,
                view,
                norm,
                neighbours=neighbours,
                waits=place == len(norms) - 1,
            )
        mixed = builder.take_area("mixed", query)
        builder.add_attention(areas["query"], areas["key"], areas["value"], mixed, view, layer)
        if attention.sub_norm:
            builder.add_norm("attention_sub_norm", mixed, mixed, query, is_rms=True)
        bias = builder.read_vector("output_bias", layer) if attention.output_bias else 0
        self._add_output("output", "attention_output_norm", mixed, query, layer, bias)

    def _add_ffn(self, layer: int, read: Area) -> None:
        builder, ffn, tensors = self._builder, self._model.ffn, self._model.tensors
        width = self._model.shape.ffn
        inner = builder.take_area("inner", 2 * width)
        fused = self._find("fused_gate_up", layer) if tensors.fused_gate_up is not None else None
        if fused is not None:
            bias = builder.read_vector("fused_gate_up_bias", layer) if ffn.bias else 0
            products = [Product(key="fused_gate_up", weight=fused, y=inner, bias=bias)]
        else:
            kinds = ("gate", "up") if ffn.gated else ("up",)
            products = [
                Product(
                    key=kind,
                    weight=self._need(kind, layer),
                    y=inner.skip(width * place),
                    bias=builder.read_vector(f"{kind}_bias", layer) if ffn.bias else 0,
                )
                for place, kind in enumerate(kinds)
            ]
        builder.add_products(read, self._hidden, products)
        active = builder.take_area("active", width)
        builder.add_gate(inner, inner.skip(width) if ffn.gated else None, active, width)
        if ffn.sub_norm:
            builder.add_norm("ffn_sub_norm", active, active, width, is_rms=True)
        bias = builder.read_vector("down_bias", layer) if ffn.bias else 0
        self._add_output("down", "ffn_output_norm", active, width, layer, bias)
