"""FFNs whose neurons are computed elsewhere: a program gives them input and takes their sum."""

from __future__ import annotations

from dataclasses import dataclass, field

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.feed_forward import FeedForward
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.residual import Residual, Sum
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Moe


@dataclass(slots=True)
class Stations:
    """Instructions of a layer at which a program may stop."""

    begun: int
    """The first one after its input was kept."""
    attended: int = 0
    """The first one after its mixers: from here to the gap, only x and the layer's input are
    read, and nothing of the residual stream is changed."""
    input: int = 0
    """The first one after what belongs to the next layer, which only steps need."""
    gap: int = 0
    """The first one after its neurons."""
    end: int = 0
    """The first one after the layer."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Vectors of tokens that the program and neurons share, without gaps between them."""

    read: Area
    """What neurons read [T, neuron width]."""
    given: Area
    """Their sum [T, neuron width], in the order of the residual stream."""
    normalized: Area
    """What the FFN reads [T, hidden]: ``read``, unless experts have another width."""
    ahead: Area | None = None
    """What the next layer's neurons would read of the residual stream as it is, in a step."""
    routes: Area | None = None
    """Weights of all experts [T, experts]; None without experts."""
    before: Area | None = None
    """The layer's input, if FFNs or routers read it."""
    layers: list[Stations] = field(default_factory=list)
    """By layer."""


class OutsideFeedForward:
    """Adds what stands before and after the neurons of a layer."""

    def __init__(
        self, model: Model, builder: Builder, residual: Residual, ffn: FeedForward
    ) -> None:
        self._model, self._builder, self._residual, self._ffn = model, builder, residual, ffn
        self._hidden, width = model.shape.hidden, model.stored_neuron_width

        def take(name: str, size: int, tokens: int | None = None) -> Area:
            return builder.take_area(name, size, tokens=tokens, is_tight=True)

        moe, read = model.moe, take("neurons read", width)
        has_own = moe is not None and moe.latent is not None
        self.exchange = Exchange(
            read=read,
            given=take("neurons give", width),
            normalized=take("ffn reads", model.shape.stored_hidden) if has_own else read,
        )
        if builder.extent.predicts:
            self.exchange.ahead = take("ahead", width, builder.extent.step_tokens)
        if moe is not None:
            self.exchange.routes = take("routes of experts", model.expert_count)
        self._is_parallel = model.residual == "parallel"
        self._routes_early = moe is not None and moe.router_input == "layer"
        if self._is_parallel or self._routes_early:
            self.exchange.before = take("layer reads", model.shape.stored_hidden)

    def begin_layer(self) -> None:
        before = self.exchange.before
        if before is not None:
            self._builder.add_cap(self._residual.x, self._hidden, 0.0, 1.0, before)
        self.exchange.layers.append(Stations(len(self._builder.instructions)))

    def end_layer(self) -> None:
        self.exchange.layers[-1].end = len(self._builder.instructions)

    def _add_input(self, layer: int) -> None:
        """Add what the FFN reads."""
        ahead = self.exchange.ahead
        if ahead is not None and layer + 1 < self._model.shape.layers:
            self._residual.open(layer, "hyper_ffn")
            self._builder.layer = layer + 1
            self._add_norm(ahead)
            self._builder.layer = layer
        self.exchange.layers[-1].input = len(self._builder.instructions)
        if self._model.blocks[layer].ffn.kind != "none":
            self._residual.open(layer, "hyper_ffn")
        self._add_norm(self.exchange.normalized)

    def _add_norm(self, target: Area) -> None:
        builder, before = self._builder, self.exchange.before
        x = before if self._is_parallel and before is not None else self._residual.read
        if self._model.norm.inputs:
            builder.add_norm("ffn_norm", x, target, self._hidden)
        else:
            builder.add_cap(x, self._hidden, 0.0, 1.0, target)

    def add(self, layer: int) -> None:
        """Add a layer's FFN, with a gap for its neurons."""
        moe, exchange = self._model.moe, self.exchange
        stations = exchange.layers[-1]
        stations.attended = len(self._builder.instructions)
        self._add_input(layer)
        if moe is not None:
            self._add_routes(layer, moe)
        if moe is not None and moe.latent is not None and self._has_router(layer):
            read = exchange.normalized
            self._builder.add_product(read, self._hidden, "experts_in", layer, exchange.read)
        stations.gap = len(self._builder.instructions)
        if self._model.blocks[layer].ffn.kind != "none":
            self._finish(layer)
            self._residual.close()

    def _has_router(self, layer: int) -> bool:
        return self._model.blocks[layer].ffn.has_router

    def _add_routes(self, layer: int, moe: Moe) -> None:
        """Add the weights of all experts."""
        builder, exchange, ffn = self._builder, self.exchange, self._model.blocks[layer].ffn
        count, routes = self._model.expert_count, exchange.routes
        assert routes is not None
        if not ffn.has_router:
            row = builder.keep(count, lambda: [float(own < ffn.active) for own in range(count)])
            builder.add_cap(Area(row.ctypes.data, 0), count, 0.0, 1.0, routes)
            return
        read = exchange.normalized
        if self._routes_early and exchange.before is not None:
            read = exchange.before
        scores = builder.take_area("scores", moe.experts)
        self._ffn.add_scores(layer, moe, read, scores)
        chosen = builder.list_routed()
        builder.add_choice(scores, layer, chosen.expert_of, chosen.weights)
        shared = None
        if moe.shared_gate:
            shared = builder.take_area("shared_score", 1)
            builder.add_product(read, self._hidden, "shared_router", layer, shared)
        builder.add_spread(chosen, routes, count, moe.shared_experts, moe.shared_factor, shared)

    def _finish(self, layer: int) -> None:
        """Add what becomes of the neurons' sum."""
        builder, model, given = self._builder, self._model, self.exchange.given
        total, moe, side = self._residual.begin(), model.moe, model.side_ffn
        if model.ffn.bias and moe is None:
            bias = builder.read_vector("down_bias", layer)
            builder.add_term(Area(bias, 0), given, self._hidden)
        if moe is not None and moe.latent is not None:
            if self._has_router(layer):
                builder.add_product(given, moe.latent, "experts_out", layer, **total.take())
        elif side is not None and side.norms:
            self._ffn.add_normalized("experts_output_norm", given, total)
        elif side is None and model.norm.outputs:
            self._residual.end("ffn_output_norm", given)
            return
        else:
            self._add_sum(given, total)
        if model.side_width:
            self._ffn.add_side(layer, model.side_width, self.exchange.normalized, total)
        self._residual.end("ffn_output_norm")

    def _add_sum(self, given: Area, total: Sum) -> None:
        own = total.take()
        if not own["added"]:
            self._builder.add_cap(given, self._hidden, 0.0, own["factor"], total.area)
            return
        if own["factor"] != 1.0:
            self._builder.add_cap(given, self._hidden, 0.0, own["factor"])
        self._builder.add_term(given, total.area, self._hidden)
