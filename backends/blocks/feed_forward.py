"""FFNs of layers: dense ones, experts, and what stands next to experts."""

from __future__ import annotations

from typing import Any

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.operands import Area, Routed
from pi2.backends.blocks.residual import Residual, Sum
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Moe

Kinds = tuple[str, str, str]
"""Keys of the matrices of gates, ups and downs."""


class FeedForward:
    """Adds the FFNs of layers to a program."""

    def __init__(self, model: Model, builder: Builder, residual: Residual) -> None:
        self._model, self._builder, self._residual = model, builder, residual
        self._hidden = model.shape.hidden
        self.predictions: dict[int, tuple[int, int]] = {}
        """First and last of these instructions, which stand before a layer's own choice."""
        self._routed: Routed | None = None
        """Experts that the layer has chosen."""

    def begin_layer(self, layer: int) -> None:
        """Let the router choose now, if it reads the layer's input."""
        moe, self._routed = self._model.moe, None
        if moe is None or not self._model.blocks[layer].ffn.has_router:
            return
        if moe.router_input == "layer":
            self._routed = self._add_routing(layer, moe, self._residual.x)

    def add(self, layer: int, read: Area) -> None:
        """Add a layer's FFN, which reads ``read``, to the residual stream."""
        model, total = self._model, self._residual.begin()
        own, moe = model.blocks[layer].ffn, model.moe
        if moe is None:
            self._add_dense(layer, read, ("gate", "up", "down"), "fused_gate_up", own.width, total)
        elif not own.has_router:
            kinds = ("dense_gate", "dense_up", "dense_down")
            self._add_dense(layer, read, kinds, "fused_dense", own.width, total)
        else:
            self._add_mixture(layer, moe, read, total)
        self._residual.end("ffn_output_norm")

    def _add_dense(
        self, layer: int, read: Area, kinds: Kinds, fused: str, width: int, total: Sum
    ) -> None:
        active = self._add_active(layer, read, kinds, fused, width)
        self._add_down(layer, kinds[2], active, width, total)

    def _add_active(self, layer: int, read: Area, kinds: Kinds, fused: str, width: int) -> Area:
        """Add the inputs of an FFN and its activations; return these."""
        builder, ffn = self._builder, self._model.ffn
        inner = builder.take_area("inner", 2 * width)
        own = enumerate(kinds[:2] if ffn.gated else kinds[1:2])
        parts = [(kind, inner.skip(width * place)) for place, kind in own]
        builder.add_products(read, self._hidden, builder.list_inputs(fused, layer, parts, ffn.bias))
        cutoff = self._model.blocks[layer].ffn.cutoff
        if cutoff is not None:
            builder.add_cut(inner, width, cutoff)
        active = builder.take_area("active", width)
        builder.add_gate(inner, inner.skip(width) if ffn.gated else None, active, width)
        if ffn.sub_norm:
            builder.add_norm("ffn_sub_norm", active, active, width, norm=builder.rms)
        return active

    def _add_down(
        self, layer: int, key: str, active: Area, width: int, total: Sum, factor: float = 1.0
    ) -> None:
        more = {"has_bias": self._model.ffn.bias, **total.take(factor)}
        self._builder.add_product(active, width, key, layer, **more)

    def _add_mixture(self, layer: int, moe: Moe, read: Area, total: Sum) -> None:
        builder, ffn, side = self._builder, self._model.ffn, self._model.side_ffn
        width, active = self._model.shape.ffn, moe.active_experts
        routed = self._routed or self._add_routing(layer, moe, read)
        if moe.shared_experts:
            self._add_shared(layer, moe, read, total)
        if side is not None:
            self.add_side(layer, side.width, read, total)
        own, length = total, self._hidden
        if moe.latent is not None:
            length, latent = moe.latent, builder.take_area("experts read", moe.latent)
            builder.add_product(read, self._hidden, "experts_in", layer, latent)
            read, own = latent, Sum(builder.take_area("experts give", length))
        elif side is not None and side.norms:
            own = Sum(builder.take_area("experts give", length))
        if not own.has_terms:
            builder.add_cap(Area(builder.fill(0.0, length), 0), length, 0.0, 1.0, own.area)
            own.has_terms = True
        inner = builder.take_area("pairs", 2 * width, active)
        kinds, is_input = ("gate", "up") if ffn.gated else ("up",), moe.weighs == "input"
        parts = [(kind, inner.skip(width * place)) for place, kind in enumerate(kinds)]
        more: dict[str, Any] = {"routed": routed, "is_weighed": is_input}
        products = builder.list_inputs("fused_gate_up", layer, parts, ffn.bias, **more)
        builder.add_products(read, length, products)
        mixed = builder.take_area("active", width, active)
        ups = inner.skip(width) if ffn.gated else None
        builder.add_gate(inner, ups, mixed, width, each=active, is_routed=True)
        if ffn.sub_norm:
            builder.add_norm("ffn_sub_norm", mixed, mixed, width, norm=builder.rms, each=active)
        more = {"routed": routed, "of_tokens": False, "is_weighed": not is_input}
        down = builder.make_product("down", layer, has_bias=ffn.bias, **own.take(), **more)
        builder.add_products(mixed, width, [down], each=active)
        if moe.latent is not None:
            builder.add_product(own.area, length, "experts_out", layer, **total.take())
        elif own is not total:
            self.add_normalized("experts_output_norm", own.area, total)

    def add_normalized(self, norm: str, given: Area, total: Sum) -> None:
        own = total.take()
        self._builder.add_norm(
            norm, given, own["y"], self._hidden, added=own["added"], factor=own["factor"]
        )

    def _add_routing(self, layer: int, moe: Moe, read: Area) -> Routed:
        """Add the choice of a layer's experts, after the next layer's early one."""
        builder = self._builder
        scores = builder.take_area("scores", moe.experts)
        self.add_scores(layer, moe, read, scores)
        routed = builder.list_routed()
        if builder.extent.predicts and layer + 1 < len(self._model.blocks):
            self._add_prediction(layer + 1, moe, routed)
        builder.add_routing(scores, layer, routed)
        return routed

    def add_scores(self, layer: int, moe: Moe, read: Area, scores: Area) -> None:
        builder = self._builder
        if moe.router_input == "stream":
            own = builder.take_area("router reads", self._hidden)
            builder.add_norm(
                "router_norm",
                self._residual.x,
                own,
                self._hidden,
                norm=builder.rms,
                factor=moe.input_scale,
            )
            read = own
        builder.add_product(read, self._hidden, "router", layer, scores, moe.router_bias)

    def _add_prediction(self, layer: int, moe: Moe, routed: Routed) -> None:
        """Let the router of ``layer``, the next one, choose by the residual stream as it is."""
        builder = self._builder
        if not self._model.blocks[layer].ffn.has_router:
            return
        now, builder.layer, first = builder.layer, layer, len(builder.instructions)
        read = self._residual.x
        if moe.router_input == "ffn":
            read = self._residual.normalize("ffn_norm", builder.take_area("ahead", self._hidden))
        scores = builder.take_area("predicted scores", moe.experts)
        self.add_scores(layer, moe, read, scores)
        builder.add_choice(scores, layer, routed.predicted, routed.predicted_weights)
        builder.layer = now
        self.predictions[layer - 1] = first, len(builder.instructions)

    def _add_shared(self, layer: int, moe: Moe, read: Area, total: Sum) -> None:
        builder, width = self._builder, moe.count_shared(self._model.shape.ffn)
        scores = builder.take_area("shared_score", 1)
        if moe.shared_gate:
            builder.add_product(read, self._hidden, "shared_router", layer, scores)
        kinds = ("shared_gate", "shared_up", "shared_down")
        active = self._add_active(layer, read, kinds, "fused_shared", width)
        if moe.shared_gate:
            builder.add_weighing(active, width, scores)
        self._add_down(layer, kinds[2], active, width, total, moe.shared_factor)

    def add_side(self, layer: int, width: int, read: Area, total: Sum) -> None:
        """Add the dense FFN next to experts."""
        builder, kinds = self._builder, ("side_gate", "side_up", "side_down")
        side, own = self._model.side_ffn, total
        has_norms = side is not None and side.norms
        if has_norms:
            read = builder.take_area("side reads", self._hidden)
            builder.add_norm("side_norm", self._residual.x, read, self._hidden)
            own = Sum(builder.take_area("side gives", self._hidden))
        self._add_dense(layer, read, kinds, "", width, own)
        if has_norms:
            self.add_normalized("side_output_norm", own.area, total)
