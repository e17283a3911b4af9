"""The residual stream: inputs of operators, and sums of their outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.gated_streams import GatedStreamBuilder
from pi2.backends.blocks.instructions import put_float
from pi2.backends.blocks.operands import Area, Product
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import AltUp, Hyper


@dataclass(slots=True)
class Sum:
    """Vectors that terms are added to."""

    area: Area
    factor: float = 1.0
    """Factor of all terms."""
    has_terms: bool = False
    """Whether there is something that is added to."""

    def take(self, factor: float = 1.0) -> dict[str, Any]:
        """Return what a product needs that gives one more term, times ``factor``."""
        added, self.has_terms = self.has_terms, True
        return {"y": self.area, "added": added, "factor": self.factor * factor}


class Residual:
    """Instructions that read the residual stream and add to it."""

    def __init__(self, model: Model, builder: Builder) -> None:
        self._model, self._builder = model, builder
        self._hidden = model.shape.hidden
        altup = model.altup
        self.streams = None if altup is None else Streams(model, builder, altup)
        """All streams of a token, if there are several."""
        self.mixed: MixedStreams | GatedStreamBuilder | None = None
        """Streams of a token that operators mix."""
        if model.hyper is not None:
            self.mixed = MixedStreams(model, builder, model.hyper)
        elif model.gated_streams is not None:
            self.mixed = GatedStreamBuilder(model, builder, model.gated_streams)
        if self.streams is not None:
            self.x = self.streams.x
        elif self.mixed is not None:
            self.x = self.mixed.x
        else:
            self.x = builder.take_area("x", self._hidden)
        self.read = self.x if self.mixed is None else self.mixed.read
        """Input of the next operator, before its norm."""

    def normalize(self, key: str, target: Area) -> Area:
        """Return what an operator reads: normalised, or as it is."""
        norm = self._model.norm
        if not norm.inputs:
            return self.read
        self._builder.add_norm(key, self.read, target, self._hidden)
        return target

    def open(self, layer: int, key: str) -> None:
        """Begin an operator: streams that are mixed give its input."""
        if self.mixed is not None:
            self.mixed.begin(layer, key)

    def close(self) -> None:
        """End it: they take its output."""
        if self.mixed is not None:
            self.mixed.end()

    def begin(self) -> Sum:
        """Return what an operator's output is added to until `end`."""
        if self._model.norm.outputs:
            return Sum(self._builder.take_area("given", self._hidden))
        if self.mixed is not None:
            return Sum(self.mixed.given, self._model.multipliers.residual)
        return Sum(self.x, self._model.multipliers.residual, True)

    def end(self, norm: str, given: Area | None = None) -> None:
        """Add the sum of `begin`, or another one, to the residual stream, normalised if outputs
        are."""
        if self._model.norm.outputs:
            given = given or self._builder.take_area("given", self._hidden)
            factor = self._model.multipliers.residual
            total = Sum(self.x, 1.0, True) if self.mixed is None else Sum(self.mixed.given)
            own = total.take(factor)
            self._builder.add_norm(
                norm, given, total.area, self._hidden, added=own["added"], factor=own["factor"]
            )


class Streams:
    """Adds the streams of a model to a program; the residual stream is the first one."""

    def __init__(self, model: Model, builder: Builder, altup: AltUp) -> None:
        self._builder, self._altup, self._hidden = builder, altup, model.shape.hidden
        self._count = altup.streams
        width = self._count * self._hidden
        self.x = builder.take_area("streams", width, is_tight=True)
        """All of them."""
        self.before = builder.take_area("predicted streams", width, is_tight=True)

    @property
    def others(self) -> list[Area]:
        """The streams after the first."""
        return [self.x.skip(n * self._hidden) for n in range(1, self._count)]

    def add_embedding(self) -> None:
        """Add what makes the other streams of the first."""
        builder, hidden = self._builder, self._hidden
        weight = builder.need("stream_in", None)
        products = [Product(key="stream_in", weight=weight, y=self.x.skip(hidden))]
        each = weight.rows // (self._count - 1)
        if each != hidden:
            # Rows of zeros are between the streams' matrices.
            firsts = range(0, weight.rows * weight.row_bytes, each * weight.row_bytes)
            data = weight.data
            parts = [
                replace(weight, rows=hidden, data=None if data is None else data[first:])
                for first in firsts
            ]
            products = [
                Product(key="stream_in", weight=own, y=y)
                for own, y in zip(parts, self.others, strict=True)
            ]
        builder.add_products(self.x, hidden, products)
        self._add_match(self.x.skip(hidden))

    def _add_match(self, y: Area) -> None:
        """Give the other streams the size of the first."""
        values = {"factors": 0, "factors_stride": 0, "x_stride": self.x.stride}
        self._add("match", y, self._count - 1, values)

    def _add(self, kernel: str, y: Area, count: int, values: dict[str, int]) -> None:
        own = {"x": self.x.address, "y": y.address, "stride": y.stride, "count": count}
        self._builder.add(kernel, {**own, "length": self._hidden, **values}, each=1)

    def begin_layer(self, layer: int) -> None:
        """Predict all streams; the layer changes the first."""
        builder, count = self._builder, self._count
        factors = self._add_factors(layer, "altup_predict", count * count)
        self._add("predict", self.before, count, factors)
        builder.add_cap(self.before, self._hidden, 0.0, 1.0, self.x)

    def end_layer(self, layer: int) -> None:
        """Correct all predictions by what the layer has made of the first stream."""
        factors = self._add_factors(layer, "altup_correct", self._count)
        self._add("correct", self.before, self._count, factors)

    def _add_factors(self, layer: int, key: str, rows: int) -> dict[str, int]:
        builder, hidden, count = self._builder, self._hidden, self._count
        read, made = builder.take_area("router reads", hidden), builder.take_area("routes", count)
        builder.add_norm("altup_router_norm", self.x, read, hidden, factor=1 / hidden)
        builder.add_product(read, hidden, "altup_router", layer, made)
        builder.add_cap(made, count, 1.0, 1.0)
        factors = builder.take_area("factors", rows)
        builder.add_product(made, count, key, layer, factors)
        return factors.put("factors")

    def add_laurel(self, layer: int, read: Area) -> None:
        """Add ``read``, the input of attention, and LAuReL to the first stream."""
        builder, hidden, rank = self._builder, self._hidden, self._altup.laurel_rank
        inner, given = builder.take_area("laurel", rank), builder.take_area("given", hidden)
        builder.add_product(read, hidden, "laurel_in", layer, inner)
        builder.add_product(inner, rank, "laurel_out", layer, given)
        builder.add_norm("laurel_norm", given, self.x, hidden, added=True)
        builder.add_term(read, self.x, hidden)
        builder.add_cap(self.x, hidden, 0.0, math.sqrt(0.5))

    def scale_first(self, layer: int) -> Area:
        """Return what gates a layer's own embedding."""
        if not self._altup.scaled:
            return self.x
        scaled = self._builder.take_area("router reads", self._hidden)
        weights = self._builder.read_vector("altup_scale", layer)
        self._builder.add_term(self.x, scaled, self._hidden, weights)
        return scaled

    def join(self) -> None:
        """Let the first stream be the mean of all, projected and as large as it is."""
        builder, hidden, count = self._builder, self._hidden, self._count - 1
        for number, stream in enumerate(self.others):
            target = builder.take_area("joined streams", count * hidden, is_tight=True)
            builder.add_cap(stream, hidden, 0.0, 1.0, target.skip(number * hidden))
        given = builder.take_area("projected streams", count * hidden, is_tight=True)
        out = Product(
            key="stream_out", weight=builder.need("stream_out", None), y=Area(given.address, hidden)
        )
        builder.add_heads(Area(target.address, hidden), hidden, out, count, rows=hidden)
        self._add_match(given)
        for number in range(count):
            builder.add_term(given.skip(number * hidden), self.x, hidden)
        builder.add_cap(self.x, hidden, 0.0, 1 / self._count)


class MixedStreams:
    """Adds streams that operators mix to a program.  Behind them is one more vector, the output."""

    def __init__(self, model: Model, builder: Builder, hyper: Hyper) -> None:
        self._builder, self._hyper, self._hidden = builder, hyper, model.shape.hidden
        self._width = hyper.streams * self._hidden
        whole = self._width + model.shape.stored_hidden
        self.x = builder.take_area("streams", whole, is_tight=True)
        """All of them."""
        self._made = builder.take_area("mixed streams", whole, is_tight=True)
        self.read, self.given = self._made.skip(self._width), self.x.skip(self._width)
        """Input and output of an operator."""
        side = hyper.streams + 1
        self._factors, self.kept = (
            builder.take_area(name, side * side) for name in ("factors", "kept factors")
        )
        """Factors of inputs, and factors that add outputs to the streams."""

    def add_embedding(self) -> None:
        """Let all streams be the first one."""
        for number in range(1, self._hyper.streams):
            target = self.x.skip(number * self._hidden)
            self._builder.add_cap(self.x, self._hidden, 0.0, 1.0, target)
        self._builder.add_cap(self.x, self._hidden, 0.0, 0.0, self.given)

    def begin(self, layer: int, key: str) -> None:
        """Make the input of an operator, by the tensors that ``key`` names."""
        self._make_factors(key, layer)
        self._multiply(self._factors)

    def _make_factors(self, key: str, layer: int) -> None:
        builder, own = self._builder, self._hyper
        flat = builder.take_area("streams read", self._width)
        made = builder.take_area("stream factors", own.factors)
        builder.add_norm("", self.x, flat, self._width, norm=builder.rms)
        builder.add_product(flat, self._width, key, layer, made)
        builder.add(
            "mix",
            {
                **made.put("x"),
                "count": own.streams,
                "scales": builder.read_vector(f"{key}_scale", layer, least=3),
                "bias": builder.read_vector(f"{key}_bias", layer, least=own.factors),
                "epsilon": put_float(own.epsilon),
                "rounds": own.rounds,
                **self._factors.put("read"),
                **self.kept.put("kept"),
            },
            each=1,
        )

    def end(self) -> None:
        """Mix the streams with the output of the operator."""
        self._multiply(self.kept)
        self._builder.add_cap(self._made, self._width, 0.0, 1.0, self.x)

    def _multiply(self, factors: Area) -> None:
        x, y = self.x, self._made
        values = {"x": x.address, "y": y.address, "stride": x.stride, "length": self._hidden}
        values |= {"count": self._hyper.streams + 1, **factors.put("factors")}
        self._builder.add("predict", values, each=1)

    def join(self) -> None:
        """Let the first stream be the mean of all, or a sum by a projection's coefficients."""
        count = self._hyper.streams
        if self._hyper.head:
            self._make_factors("hyper_head", 0)
            self._multiply(self._factors)
            self._builder.add_cap(self.read, self._hidden, 0.0, 1.0, self.x)
            return
        for number in range(1, count):
            self._builder.add_term(self.x.skip(number * self._hidden), self.x, self._hidden)
        self._builder.add_cap(self.x, self._hidden, 0.0, 1 / count)
