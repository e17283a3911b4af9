"""Several residual streams, which predict each other, and LAuReL
(`pi2.plan.documents.model_mixing`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_quantize
from pi2.backends.kernels.norms import emit_add_normalized, emit_normalize, emit_scale, invert_root
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.schedule import Schedule, emit_each_token, take_matrix
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.documents.model_mixing import SMALLEST_SQUARE
from pi2.plan.weights.layout import fill_groups

_LANES = 16


def take_streams(schedule: Schedule, take: Parameters) -> v.Buffer:
    altup = schedule.spec.model.altup
    assert altup is not None
    return take.take_array("streams", "float32", "tokens", altup.others, schedule.spec.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What coefficients are made of, float32: a vector of ``streams`` elements for each token."""

    spec: KernelSpec
    rows: v.Buffer
    """[streams, hidden]."""
    norm: v.Buffer
    """[hidden]."""

    def emit(self, x: v.Buffer, base: v.Expr) -> list[v.Expr]:
        """Return the elements, by x from ``base`` on."""
        spec, altup = self.spec, self.spec.model.altup
        assert altup is not None
        zero = v.constant(0.0, "float32", _LANES)
        squares, sums = v.Cell(zero), [v.Cell(zero) for _ in range(altup.streams)]
        with T.serial(spec.hidden // _LANES) as step:
            place = v.let(step * _LANES)
            part = v.let(v.load(x, base + place, _LANES))
            squares.set(T.fma(part, part, squares.get()))
            weighed = v.let(part * v.load(self.norm, place, _LANES))
            for stream, cell in enumerate(sums):
                row = v.load(self.rows, place + stream * spec.hidden, _LANES)
                cell.set(T.fma(weighed, row, cell.get()))
        factor = invert_root(spec, squares.get(), spec.normalized_width, _LANES)
        factor = v.let(factor * v.constant(1.0 / spec.normalized_width, "float32"))
        totals = [v.add_lanes(cell.get(), "float32", _LANES) for cell in sums]
        return [v.let(v.take_tanh(v.let(total * factor), 1)) for total in totals]


def take_routing(schedule: Schedule, take: Parameters) -> Routing:
    spec, altup = schedule.spec, schedule.spec.model.altup
    assert altup is not None
    return Routing(
        spec=spec,
        rows=take.take_array("altup_router", "float32", altup.streams, spec.hidden),
        norm=take.take_array("altup_router_norm", "float32", spec.hidden),
    )


def _project(rows: v.Buffer, row: int, inputs: list[v.Expr], start: float) -> v.Expr:
    """``start`` and the product of a row [streams] with ``inputs``."""
    total = v.constant(start, "float32")
    for index, value in enumerate(inputs):
        total = T.fma(rows[row * len(inputs) + index], value, total)
    return v.let(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What attention begins with: predictions of all streams, and LAuReL's part of x."""

    schedule: Schedule
    routing: Routing
    coefficients: v.Buffer
    streams: v.Buffer
    inner: Matrix
    outer: Matrix
    norm: v.Buffer
    laurel: Activations

    def emit_predict(self, x: v.Buffer, token: v.Expr) -> None:
        """Replace the streams of ``token`` by what the layer predicts."""
        spec, altup = self.schedule.spec, self.schedule.spec.model.altup
        assert altup is not None
        base, count = v.let(token * spec.hidden), altup.streams
        first = v.let(token * (altup.others * spec.hidden))
        routed = self.routing.emit(x, base)
        factors = [
            [
                _project(
                    self.coefficients, target * count + source, routed, float(target == source)
                )
                for source in range(count)
            ]
            for target in range(count)
        ]
        with T.serial(spec.hidden // _LANES) as step:
            places = [(x, v.let(base + step * _LANES))]
            places += [
                (self.streams, v.let(first + (stream * spec.hidden + step * _LANES)))
                for stream in range(altup.others)
            ]
            parts = [v.let(v.load(buffer, place, _LANES)) for buffer, place in places]
            for row, (buffer, place) in zip(factors, places, strict=True):
                total = v.constant(0.0, "float32", _LANES)
                for factor, part in zip(row, parts, strict=True):
                    total = T.fma(v.splat(factor, _LANES), part, total)
                v.store(buffer, place, v.let(total), _LANES)

    def emit_laurel(self, x: v.Buffer, hidden: Activations, tokens: v.Expr) -> None:
        """Add to x what attention reads, ``hidden``, and LAuReL's projections of it; the values of
        ``hidden`` are lost."""
        schedule, laurel = self.schedule, self.laurel
        spec, isa = schedule.spec, schedule.isa

        def store_inner(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(laurel.values, token * laurel.length + row, value, 1)

        def store_outer(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(hidden.values, token * spec.hidden + row, value, 1)

        def pass_on(token: v.Expr) -> None:
            emit_quantize(laurel, token)
            with T.serial(spec.hidden // _LANES) as step:
                place = v.let(token * spec.hidden + step * _LANES)
                part = v.load(x, place, _LANES) + v.load(hidden.values, place, _LANES)
                v.store(x, place, part, _LANES)

        def add(token: v.Expr) -> None:
            emit_add_normalized(spec, hidden.values, x, self.norm, hidden.once, token)

        emit_multiply(isa, spec.threads, self.inner, hidden, tokens, store_inner)
        emit_each_token(tokens, pass_on)
        emit_multiply(isa, spec.threads, self.outer, laurel, tokens, store_outer)
        emit_each_token(tokens, add)

    def emit_end(self, x: v.Buffer, tokens: v.Expr) -> None:
        """Divide x by sqrt(2), when attention is added."""
        hidden, factor = self.schedule.spec.hidden, math.sqrt(0.5)
        emit_each_token(tokens, lambda token: emit_scale(x, v.let(token * hidden), hidden, factor))


def take_prediction(schedule: Schedule, take: Parameters, count: v.Expr) -> Prediction | None:
    """Declare the parameters; None for models with one stream.  ``count``: see
    `Schedule.take_chunk`."""
    spec, altup = schedule.spec, schedule.spec.model.altup
    if altup is None:
        return None
    streams, rank = altup.streams, altup.laurel_rank
    length = fill_groups(rank)
    return Prediction(
        schedule=schedule,
        routing=take_routing(schedule, take),
        coefficients=take.take_array("altup_predict", "float32", streams * streams, streams),
        streams=take_streams(schedule, take),
        inner=take_matrix(take, "laurel_in", rank, spec.hidden, spec.precision.attention),
        outer=take_matrix(take, "laurel_out", spec.hidden, length, spec.precision.attention),
        norm=take.take_array("laurel_norm", "float32", spec.hidden),
        laurel=schedule.take_chunk(take, "laurel", length, count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What an FFN ends with: all streams are corrected by what became of x."""

    schedule: Schedule
    routing: Routing
    coefficients: v.Buffer
    streams: v.Buffer
    before: v.Buffer
    """What the layer has predicted of x."""
    scale: v.Buffer | None

    def emit_correct(self, x: v.Buffer, token: v.Expr) -> None:
        """Correct the streams of ``token``."""
        spec, altup = self.schedule.spec, self.schedule.spec.model.altup
        assert altup is not None
        base = v.let(token * spec.hidden)
        first = v.let(token * (altup.others * spec.hidden))
        routed = self.routing.emit(x, base)
        factors = [
            _project(self.coefficients, stream, routed, 1.0) for stream in range(altup.streams)
        ]
        with T.serial(spec.hidden // _LANES) as step:
            place = v.let(base + step * _LANES)
            before = v.let(v.load(self.before, place, _LANES))
            change = v.let(v.load(x, place, _LANES) - before)
            v.store(x, place, T.fma(v.splat(factors[0], _LANES), change, before), _LANES)
            for stream, factor in enumerate(factors[1:]):
                at = v.let(first + (stream * spec.hidden + step * _LANES))
                other = v.load(self.streams, at, _LANES)
                v.store(self.streams, at, T.fma(v.splat(factor, _LANES), change, other), _LANES)

    def emit_read(self, x: v.Buffer, hidden: Activations, token: v.Expr) -> None:
        """Set ``hidden`` of ``token`` to what gates the layer's own embedding."""
        with T.serial(hidden.length // _LANES * hidden.once) as step:
            place = v.let(token * hidden.length + step * _LANES)
            part = v.load(x, place, _LANES)
            if self.scale is not None:
                part = part * v.load(self.scale, step * _LANES, _LANES)
            v.store(hidden.values, place, part, _LANES)
        emit_quantize(hidden, token)

    def emit_add(self, hidden: Activations, norm: v.Buffer, token: v.Expr) -> None:
        """Add the norm of ``hidden`` of ``token`` to all streams but x."""
        spec, altup = self.schedule.spec, self.schedule.spec.model.altup
        assert altup is not None
        for stream in range(altup.others):
            row = v.let(token * altup.others + stream)
            emit_add_normalized(spec, hidden.values, self.streams, norm, hidden.once, token, row)


def take_correction(schedule: Schedule, take: Parameters) -> Correction | None:
    """Declare the parameters; None for models with one stream."""
    spec, altup = schedule.spec, schedule.spec.model.altup
    if altup is None:
        return None
    scale = take.take_array("altup_scale", "float32", spec.hidden) if altup.scaled else None
    return Correction(
        schedule=schedule,
        routing=take_routing(schedule, take),
        coefficients=take.take_array("altup_correct", "float32", altup.streams, altup.streams),
        streams=take_streams(schedule, take),
        before=schedule.take_rows(take, "before"),
        scale=scale,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What makes the other streams of embeddings."""

    schedule: Schedule
    project: Matrix
    streams: v.Buffer

    def emit(self, x: v.Buffer, hidden: Activations, tokens: v.Expr) -> None:
        """Set them for all tokens, of x, which ``hidden`` has quantised."""
        spec, altup = self.schedule.spec, self.schedule.spec.model.altup
        assert altup is not None
        own = altup.others * spec.hidden

        def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            v.store(self.streams, token * own + row, value, 1)

        def finish(token: v.Expr) -> None:
            wanted = emit_root(spec, x, v.let(token * spec.hidden))
            for stream in range(altup.others):
                base = v.let(token * own + stream * spec.hidden)
                factor = find_factor(spec, wanted, self.streams, base)
                emit_scale(self.streams, base, spec.hidden, factor)

        emit_multiply(self.schedule.isa, spec.threads, self.project, hidden, tokens, store)
        emit_each_token(tokens, finish)


def take_making(schedule: Schedule, take: Parameters) -> Making | None:
    """Declare the parameters; None for models with one stream."""
    spec, altup = schedule.spec, schedule.spec.model.altup
    if altup is None:
        return None
    rows = altup.others * spec.hidden
    return Making(
        schedule=schedule,
        project=take_matrix(take, "stream_in", rows, spec.hidden, spec.precision.attention),
        streams=take_streams(schedule, take),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What the last norm reads of all streams."""

    spec: KernelSpec
    projections: list[Matrix]
    streams: v.Buffer
    joined: v.Buffer
    """float32 [logits, others, hidden]: the first of them is the result."""

    def emit(
        self, isa: Isa, x: v.Buffer, hidden: Activations, first: v.Expr, tokens: v.Expr
    ) -> None:
        """Set ``joined`` of ``tokens``, the first of which is ``first``."""
        spec, others = self.spec, len(self.projections)

        for stream, project in enumerate(self.projections):

            def read(token: v.Expr, stream: int = stream) -> None:
                row = v.let((first + token) * others + stream)
                emit_normalize(spec, self.streams, row, None, hidden, token)

            def store(token: v.Expr, row: v.Expr, value: v.Expr, stream: int = stream) -> None:
                place = v.let((token * others + stream) * spec.hidden)
                v.store(self.joined, place + row, value, 1)

            emit_each_token(tokens, read)
            emit_multiply(isa, spec.threads, project, hidden, tokens, store)
        emit_each_token(tokens, lambda token: self._emit_average(x, first, token))

    def find_row(self, token: v.Expr) -> v.Expr:
        """Return the row of ``joined`` that is the result for ``token``."""
        return v.let(token * len(self.projections))

    def _emit_average(self, x: v.Buffer, first: v.Expr, token: v.Expr) -> None:
        spec, others = self.spec, len(self.projections)
        base = v.let((first + token) * spec.hidden)
        wanted = emit_root(spec, x, base)
        places = [v.let((token * others + stream) * spec.hidden) for stream in range(others)]
        factors = [find_factor(spec, wanted, self.joined, place) for place in places]
        share = v.constant(1.0 / (others + 1), "float32", _LANES)
        with T.serial(spec.hidden // _LANES) as step:
            total = v.load(x, base + step * _LANES, _LANES)
            for place, factor in zip(places, factors, strict=True):
                part = v.load(self.joined, place + step * _LANES, _LANES)
                total = T.fma(v.splat(factor, _LANES), part, total)
            v.store(self.joined, places[0] + step * _LANES, v.let(total * share), _LANES)


def take_joining(schedule: Schedule, take: Parameters) -> Joining | None:
    """Declare the parameters; None for models with one stream."""
    spec, altup = schedule.spec, schedule.spec.model.altup
    if altup is None:
        return None
    return Joining(
        spec=spec,
        projections=[
            take_matrix(
                take, f"stream_out_{stream}", spec.hidden, spec.hidden, spec.precision.attention
            )
            for stream in range(altup.others)
        ],
        streams=take_streams(schedule, take),
        joined=take.take_array("joined", "float32", "logits", altup.others, spec.hidden),
    )


def emit_root(spec: KernelSpec, source: v.Buffer, base: v.Expr) -> v.Expr:
    """Root of the mean square of the vector that begins at ``base``."""
    return v.let(T.sqrt(_average_squares(spec, source, base)))


def find_factor(spec: KernelSpec, wanted: v.Expr, source: v.Buffer, base: v.Expr) -> v.Expr:
    """What gives the vector that begins at ``base`` the root mean square ``wanted``."""
    least = v.constant(SMALLEST_SQUARE, "float32")
    return v.let(wanted / T.sqrt(T.max(_average_squares(spec, source, base), least)))


def _average_squares(spec: KernelSpec, source: v.Buffer, base: v.Expr) -> v.Expr:
    squares = v.Cell(v.constant(0.0, "float32", _LANES))
    with T.serial(spec.hidden // _LANES) as step:
        part = v.let(v.load(source, base + step * _LANES, _LANES))
        squares.set(T.fma(part, part, squares.get()))
    total = v.add_lanes(squares.get(), "float32", _LANES)
    return v.let(total * v.constant(1.0 / spec.normalized_width, "float32"))
