"""The functions of a layer's FFN: norm, neurons, residual."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.ffn import DenseRoom, emit_dense
from pi2.backends.kernels.gathered import Gathered, Run, Scratch, emit_gathered, emit_gathered_gates
from pi2.backends.kernels.neurons import NO_CUTOFF, Bundles, Squares, emit_leave_lane_order
from pi2.backends.kernels.norms import (
    NormWeights,
    emit_add_normalized,
    emit_add_scaled,
    emit_fill,
    emit_normalize,
    emit_scale,
    take_sub_norm_factor,
)
from pi2.backends.kernels.operands import EVERYTHING, Activations, Chosen
from pi2.backends.kernels.panel import Panel
from pi2.backends.kernels.plain import (
    PartSums,
    Stretches,
    Sums,
    emit_plain_gathered,
    emit_stretched,
)
from pi2.backends.kernels.schedule import Schedule, emit_each_token
from pi2.backends.kernels.selection import take_cutoffs, take_finding
from pi2.backends.kernels.shared import Naming, emit_shared_neurons
from pi2.backends.kernels.side_ffn import (
    RouterArrays,
    emit_route_tokens,
    take_latent_experts,
    take_side_ffn,
)
from pi2.backends.kernels.spec import BLOCK, BLOCK_ROOM, KEPT, PANEL, PARTS, UNPACKED
from pi2.backends.kernels.unpacking import find_unpacking
from pi2.backends.kernels.vocabulary import take_layer_input


def emit_begin_ffn(schedule: Schedule, take: Parameters) -> None:
    """Normalise and quantise x; set y to zero; in an MoE model, route."""
    _emit_begin(schedule, take, has_cutoff=False)


def emit_begin_cut_ffn(schedule: Schedule, take: Parameters) -> None:
    """The same for a layer whose gates have a cutoff, which is found."""
    _emit_begin(schedule, take, has_cutoff=True)


def _emit_begin(schedule: Schedule, take: Parameters, *, has_cutoff: bool) -> None:
    spec = schedule.spec
    tokens = take.take_number("tokens")
    routed = None if spec.router is None else take.take_number("routed")
    finding = take_finding(schedule, take) if has_cutoff else None
    cutoffs = None if has_cutoff else take_cutoffs(schedule, take)
    x = schedule.take_rows(take, "x")
    norm = schedule.take_input_norm(take)
    hidden = schedule.take_chunk(take, "hidden", spec.hidden, tokens)
    latent = take_latent_experts(schedule, take, tokens, "experts_in")
    begin = take_beginning(schedule, take, x, norm, hidden)
    router = None if routed is None else _take_router(schedule, take, hidden)

    def prepare(token: v.Expr) -> None:
        if cutoffs is not None:
            v.store(cutoffs, token, v.constant(NO_CUTOFF, "float32"), 1)
        begin(token)

    emit_each_token(tokens, prepare)
    if finding is not None:
        finding.emit(hidden, tokens)
    if latent is not None:
        latent.emit_lead(hidden, tokens)
    if routed is not None and router is not None:
        # Some layers of a mixture have no router.
        with T.If(routed > 0), T.Then():
            emit_route_tokens(spec, router, tokens)


def take_beginning(
    schedule: Schedule, take: Parameters, x: v.Buffer, norm: NormWeights | None, hidden: Activations
) -> Callable[[v.Expr], None]:
    """Declare what else the FFN of a layer begins with; return what normalises and quantises ``x``
    of a token, and sets its y to zero."""
    spec, width = schedule.spec, schedule.spec.neuron_width
    y = take.take_array("y", "float32", "tokens", width)
    squares = _take_squares(schedule, take)

    def begin(token: v.Expr) -> None:
        if squares is not None:
            v.store(squares, token, v.constant(0.0, "float32"), 1)
        emit_normalize(spec, x, token, norm, hidden, token)
        with T.serial(width // 16) as step:
            place = token * width + step * 16
            v.store(y, place, v.constant(0.0, "float32", 16), 16)

    return begin


def _take_router(schedule: Schedule, take: Parameters, hidden: Activations) -> RouterArrays:
    spec, router = schedule.spec, schedule.spec.router
    assert router is not None

    def take_row(name: str, is_there: bool, length: int) -> v.Buffer | None:
        return take.take_array(name, "float32", length) if is_there else None

    return RouterArrays(
        inputs=schedule.take_rows(take, "before")
        if router.router_input == "layer"
        else hidden.values,
        rows=take.take_array("router", "float32", router.experts, spec.hidden),
        bias=take_row("router_bias", router.router_bias, router.experts),
        choice_bias=take_row("choice_bias", router.choice_bias, router.experts),
        shared=take_row("shared_router", router.shared_gate, spec.hidden),
        routes=take.take_array("routes", "float32", "tokens", spec.experts),
    )


def emit_find_gates(schedule: Schedule, take: Parameters) -> None:
    count, token = take.take_number("count"), schedule.take_token(take)
    bundles = _take_bundles(schedule, take, "arena")
    gathered = Gathered(*_take_slots(schedule, take), count)
    hidden = schedule.take_hidden(take, count)
    gates = take.take_array("gates", "float32", "neurons")
    emit_gathered_gates(schedule.isa, hidden, bundles, gathered, gates, token)


def _take_bundles(schedule: Schedule, take: Parameters, name: str) -> Bundles:
    spec = schedule.spec
    arena = take.take_given_array(name, "uint8", "slots", spec.stride)
    scales = None
    if spec.scales == "resident":
        scales = take.take_array("scales", "uint8", "neurons", spec.bundle.scales_stride)
    size = find_unpacking(spec.precision.gates).table_bytes
    table = take.take_array("block_table", "uint8", size) if size else None
    return Bundles(spec=spec, arena=arena, scales=scales, table=table)


def _take_squares(schedule: Schedule, take: Parameters) -> v.Buffer | None:
    """Declare the sums of the squares of each token's activations, if these are normalised."""
    if not schedule.spec.sub_norm:
        return None
    return take.take_array("squares", "float32", "tokens")


def _take_thread_squares(
    schedule: Schedule, take: Parameters, name: str = "own_squares"
) -> Squares | None:
    total = _take_squares(schedule, take)
    if total is None:
        return None
    rows = ("threads",) if name == "own_squares" else ("sequences", "threads")
    return Squares(total=total, own=take.take_array(name, "float32", *rows))


def _take_slots(schedule: Schedule, take: Parameters) -> tuple[v.Buffer, v.Buffer | None]:
    """Declare slots of neurons, and the rows of their scales where these are resident."""
    slots = take.take_array("slots", "int32", "neurons")
    resident = schedule.spec.scales == "resident"
    return slots, take.take_array("rows", "int32", "neurons") if resident else None


def emit_add_neurons(schedule: Schedule, take: Parameters) -> None:
    _emit_gathered(schedule, take, known=False)


def emit_add_open_neurons(schedule: Schedule, take: Parameters) -> None:
    """Add gathered neurons whose gates `predict_gate` has computed and found open."""
    _emit_gathered(schedule, take, known=True)


def _emit_gathered(schedule: Schedule, take: Parameters, *, known: bool) -> None:
    count, token = take.take_number("count"), schedule.take_token(take)
    limit = take.take_number("limit", "float32") if known and schedule.spec.is_smooth else None
    bundles = _take_bundles(schedule, take, "arena")
    slots, rows = _take_slots(schedule, take)
    hidden = schedule.take_hidden(take, count)
    scratch = Scratch(
        gates=take.take_array("gates", "float32", "neurons"),
        values=take.take_array("values", "float32", "neurons"),
        firing=take.take_array("firing", "int32", "neurons"),
        firing_rows=None if rows is None else take.take_array("firing_rows", "int32", "neurons"),
        partial=schedule.take_rows(take, "partial", "threads"),
        counts=take.take_array("counts", "int32", schedule.spec.threads + 1),
        squares=_take_thread_squares(schedule, take),
    )
    total = schedule.take_rows(take, "y")
    routes = schedule.take_routes(take)
    gates = None
    if known:
        gates = (
            take.take_array("scores", "float32", "neurons"),
            take.take_array("indices", "int32", "neurons"),
        )
    run = Run(
        isa=schedule.isa,
        spec=schedule.spec,
        activations=hidden,
        bundles=bundles,
        scratch=scratch,
        routes=routes,
        token=token,
        cutoffs=take_cutoffs(schedule, take),
    )
    emit_gathered(run, Gathered(slots, rows, count), total, gates, limit)


def emit_add_shared_neurons(schedule: Schedule, take: Parameters) -> None:
    """Add gathered neurons to y of those tokens of a step that have named them."""
    spec = schedule.spec
    count, tokens = take.take_number("count"), take.take_number("tokens")
    bundles = _take_bundles(schedule, take, "arena")
    slots, rows = _take_slots(schedule, take)
    resident = rows is not None
    scratch = Scratch(
        gates=take.take_array("block_gates", "float32", "threads", BLOCK),
        values=take.take_array("block_values", "float32", "threads", BLOCK),
        firing=take.take_array("block_firing", "int32", "threads", BLOCK),
        firing_rows=take.take_array("block_firing_rows", "int32", "threads", BLOCK)
        if resident
        else None,
        partial=take.take_array("partials", "float32", "sequences", "threads", spec.hidden),
        counts=take.take_array("counts", "int32", spec.threads + 1),
        squares=_take_thread_squares(schedule, take, "token_squares"),
    )
    naming = Naming(
        slots=slots,
        rows=rows,
        named=take.take_array("named", "int32", "neurons"),
        count=count,
        tokens=tokens,
        own_slots=take.take_array("block_slots", "int32", "threads", "sequences", BLOCK_ROOM),
        own_rows=take.take_array("block_rows", "int32", "threads", "sequences", BLOCK_ROOM)
        if resident
        else None,
    )
    run = Run(
        isa=schedule.isa,
        spec=spec,
        activations=schedule.take_hidden(take, count).for_chunk(),
        bundles=bundles,
        scratch=scratch,
        routes=schedule.take_routes(take),
        token=T.int32(0),
    )
    emit_shared_neurons(run, naming, schedule.take_rows(take, "y"))


def emit_add_plain_neurons(schedule: Schedule, take: Parameters) -> None:
    """Add gathered neurons that have biases or no gate to y of one token."""
    count, token = take.take_number("count"), schedule.take_token(take)
    bundles = _take_bundles(schedule, take, "arena")
    gathered = Gathered(*_take_slots(schedule, take), count)
    hidden = schedule.take_hidden(take, count)
    partial = schedule.take_rows(take, "partial", "threads")
    sums = _take_sums(schedule, take, token)
    emit_plain_gathered(schedule.isa, hidden, bundles, gathered, partial, sums)


def _take_sums(schedule: Schedule, take: Parameters, token: v.Expr) -> Sums:
    return Sums(
        counts=take.take_array("counts", "int32", schedule.spec.threads + 1),
        total=schedule.take_rows(take, "y"),
        routes=schedule.take_routes(take),
        token=token,
        squares=_take_thread_squares(schedule, take),
    )


def emit_add_stretches(schedule: Schedule, take: Parameters) -> None:
    """Compute ranges of neurons, none of which is inactive, of one token, and add the finished
    parts to its y."""
    count, size = take.take_number("count"), take.take_number("stretch")
    part, finished = take.take_number("part"), take.take_number("finished")
    spec = schedule.spec
    token = schedule.take_token(take)
    bundles = _take_bundles(schedule, take, "arena")
    slots, rows = _take_slots(schedule, take)
    emit_stretched(
        schedule.isa,
        schedule.take_hidden(take, count),
        bundles,
        Stretches(slots=slots, rows=rows, count=count, size=size),
        PartSums(
            size=part,
            numbers=take.take_array("part_numbers", "int32", spec.parts),
            sums=take.take_array("part_sums", "float32", spec.parts, "threads", spec.hidden),
            finished=finished,
        ),
        _take_sums(schedule, take, token),
    )


def emit_add_dense(schedule: Schedule, take: Parameters) -> None:
    """Add contiguous neurons to y of all tokens; in an MoE model, an expert's to its tokens."""
    count = take.take_number("count")
    tokens = take.take_number("tokens")
    spec = schedule.spec
    first = take.take_number("first") if spec.scales == "resident" else None
    bundles = _take_bundles(schedule, take, "bundles")
    chosen = EVERYTHING
    if spec.experts:
        places = take.take_array("slots", "int32", "neurons")
        chosen = Chosen(
            neurons=places, tokens=take.take_array("tokens_of_expert", "int32", "tokens")
        )
    hidden = schedule.take_dense(take, count)
    values = take.take_array("values", "float32", "tokens", PANEL)
    masks = take.take_array("masks", "int32", "tokens", PARTS)
    unpacked = take.take_array("unpacked", "float32", "threads", UNPACKED + KEPT, 128)
    total = schedule.take_rows(take, "y")
    routes = schedule.take_routes(take)
    squares = _take_squares(schedule, take)
    every = Panel(
        bundles=bundles,
        first=first,
        origin=T.int32(0),
        size=count,
        chosen=chosen,
        values=values,
        routes=routes,
        cutoffs=take_cutoffs(schedule, take),
    )
    room = DenseRoom(masks=masks, unpacked=unpacked, squares=squares)
    emit_dense(schedule.isa, hidden, every, tokens, room, total)


def emit_end_ffn(schedule: Schedule, take: Parameters) -> None:
    """Add y to x, with norms of outputs through ``whole`` [T, hidden]; then the layer's own
    parts."""
    spec = schedule.spec
    tokens = take.take_number("tokens")
    x = schedule.take_rows(take, "x")
    y = take.take_array("y", "float32", "tokens", spec.neuron_width)
    # Those of experts are added where tokens are routed.
    has_bias = spec.ffn.bias and not spec.experts
    bias = take.take_array("down_bias", "float32", spec.hidden) if has_bias else None
    norm = take.take_array("output_norm", "float32", spec.hidden) if spec.norm.outputs else None
    whole = schedule.take_rows(take, "whole") if spec.norm.outputs else None
    scale = take.take_array("layer_scale", "float32", 1) if spec.model.layer_scale else None
    squares = _take_squares(schedule, take)
    side = take_side_ffn(schedule, take, tokens)
    own = take_layer_input(schedule, take, tokens)
    latent = take_latent_experts(schedule, take, tokens, "experts_out")
    if side is not None:
        side.emit(x, tokens)
    if latent is not None:
        latent.emit_back(y, x, tokens)

    def finish(token: v.Expr) -> None:
        base = v.let(token * spec.hidden)
        if squares is not None:
            emit_scale(y, base, spec.hidden, take_sub_norm_factor(spec, squares[token]))
        if latent is None:
            add_sum(token, base)
        if own is None:
            scale_all(token)

    def scale_all(token: v.Expr) -> None:
        if scale is not None:
            emit_scale(x, v.let(token * spec.hidden), spec.hidden, scale[0])

    def add_sum(token: v.Expr, base: v.Expr) -> None:
        if norm is not None and whole is not None:
            emit_fill(whole, base, spec.hidden)
            emit_leave_lane_order(spec.hidden, spec.precision.ffn, y, whole, token)
            if bias is not None:
                emit_add_scaled(bias, whole, base, spec.hidden, 1.0)
            once, given = T.min(tokens, 1), whole
            if side is not None and side.norms is not None:
                side.norms.emit_join(whole, y, token, once)
                given = y
            emit_add_normalized(spec, given, x, norm, once, token)
            return
        emit_scale(y, base, spec.hidden, spec.model.multipliers.residual)
        emit_leave_lane_order(spec.hidden, spec.precision.ffn, y, x, token)
        if bias is not None:
            emit_add_scaled(bias, x, base, spec.hidden, spec.model.multipliers.residual)

    emit_each_token(tokens, finish)
    if own is not None:
        own.emit(x, tokens)
        emit_each_token(tokens, scale_all)
