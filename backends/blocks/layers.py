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
        self.logits = builder.take_area("logits", model.shape.vocab, tokens=rows)

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
        self,
        key: str,
        norm: str,
        source: Area,
        length: int,
        layer: int,
        bias: int,
        factor: float = 1.0,
    ) -> None:
        """Add what a matrix makes of ``source``, times ``factor``, to the residual stream."""
        builder, weight = self._builder, self._need(key, layer)
        factor *= self._model.multipliers.residual
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
        model = self._model
        moe = model.moe
        if moe is None:
            self._add_dense(layer, read, ("gate", "up", "down"), "fused_gate_up", model.shape.ffn)
        elif not model.has_router(layer):
            width = moe.find_dense_width(layer, model.shape.ffn)
            kinds = ("dense_gate", "dense_up", "dense_down")
            self._add_dense(layer, read, kinds, "fused_dense", width)
        else:
            self._add_mixture(layer, read)

    def _add_dense(
        self,
        layer: int,
        read: Area,
        kinds: tuple[str, str, str],
        fused_kind: str,
        width: int,
        scores: Area | None = None,
        factor: float = 1.0,
    ) -> None:
        """Add an FFN, times ``factor`` and the sigmoid of ``scores``."""
        builder, ffn = self._builder, self._model.ffn
        inner = builder.take_area("inner", 2 * width)
        is_fused = getattr(self._model.tensors, fused_kind) is not None
        fused = self._find(fused_kind, layer) if is_fused else None
        if fused is not None:
            bias = builder.read_vector(f"{fused_kind}_bias", layer) if ffn.bias else 0
            products = [Product(key=fused_kind, weight=fused, y=inner, bias=bias)]
        else:
            products = [
                Product(
                    key=kind,
                    weight=self._need(kind, layer),
                    y=inner.skip(width * place),
                    bias=builder.read_vector(f"{kind}_bias", layer) if ffn.bias else 0,
                )
                for place, kind in enumerate(kinds[:2] if ffn.gated else kinds[1:2])
            ]
        builder.add_products(read, self._hidden, products)
        active = builder.take_area("active", width)
        builder.add_gate(inner, inner.skip(width) if ffn.gated else None, active, width)
        if ffn.sub_norm:
            builder.add_norm("ffn_sub_norm", active, active, width, is_rms=True)
        if scores is not None:
            builder.add_weighing(active, width, scores)
        bias = builder.read_vector(f"{kinds[2]}_bias", layer) if ffn.bias else 0
        self._add_output(kinds[2], "ffn_output_norm", active, width, layer, bias, factor)

    def _add_mixture(self, layer: int, read: Area) -> None:
        """Add experts, those that compute every token first."""
        builder, model, moe = self._builder, self._model, self._model.moe
        assert moe is not None
        width, active = model.shape.ffn, moe.active_experts
        router = self._need("router", layer)
        scores = builder.take_area("scores", moe.experts)
        bias = builder.read_vector("router_bias", layer) if moe.router_bias else 0
        own = Product(key="router", weight=router, y=scores, bias=bias)
        builder.add_products(read, self._hidden, [own])
        routed = builder.add_routing(scores, layer)
        self.routed = routed
        if moe.shared_experts:
            self._add_shared(layer, read)
        inner = builder.take_area("pairs", 2 * width, active)
        kinds = ("gate", "up") if model.ffn.gated else ("up",)
        is_input = moe.weighs == "input"
        products = [
            Product(
                key=kind,
                weight=self._need(kind, layer),
                y=inner.skip(width * place),
                bias=builder.read_vector(f"{kind}_bias", layer) if model.ffn.bias else 0,
                routed=routed,
                is_weighed=is_input,
            )
            for place, kind in enumerate(kinds)
        ]
        builder.add_products(read, self._hidden, products)
        mixed = builder.take_area("active", width, active)
        ups = inner.skip(width) if model.ffn.gated else None
        builder.add_gate(inner, ups, mixed, width, each=active)
        down = Product(
            key="down",
            weight=self._need("down", layer),
            y=self.x,
            bias=builder.read_vector("down_bias", layer) if model.ffn.bias else 0,
            added=True,
            factor=model.multipliers.residual,
            routed=routed,
            of_tokens=False,
            is_weighed=not is_input,
        )
        builder.add_products(mixed, width, [down], each=active)

    def _add_shared(self, layer: int, read: Area) -> None:
        builder, moe, scores = self._builder, self._model.moe, None
        assert moe is not None
        if moe.shared_gate:
            scores = builder.take_area("shared_score", 1)
            router = self._need("shared_router", layer)
            own = Product(key="shared_router", weight=router, y=scores)
            builder.add_products(read, self._hidden, [own])
        width = moe.shared_ffn or moe.shared_experts * self._model.shape.ffn
        kinds = ("shared_gate", "shared_up", "shared_down")
        self._add_dense(layer, read, kinds, "fused_shared", width, scores, moe.shared_factor)
