"""The functions of the neurons of a layer's FFN, from their input to their sum."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.ffn import DenseRoom, emit_dense
from pi2.backends.kernels.gathered import Gathered, Run, Scratch, emit_gathered, emit_gathered_gates
from pi2.backends.kernels.matrix import emit_quantize
from pi2.backends.kernels.neurons import (
    NO_CUTOFF,
    Bundles,
    Squares,
    emit_fill,
    emit_leave_lane_order,
)
from pi2.backends.kernels.operands import EVERYTHING, Chosen
from pi2.backends.kernels.panel import Panel
from pi2.backends.kernels.schedule import Schedule, emit_each_token
from pi2.backends.kernels.selection import take_cutoffs, take_finding
from pi2.backends.kernels.shared import Naming, emit_shared_neurons
from pi2.backends.kernels.spec import BLOCK, BLOCK_ROOM, KEPT, PANEL, PARTS, UNPACKED, KernelSpec
from pi2.backends.kernels.unpacking import find_unpacking


def emit_begin_ffn(schedule: Schedule, take: Parameters, *, has_cutoff: bool = False) -> None:
    """Quantise what neurons read, and set their sum y to zero; find the cutoff of the layer's
    gates, if it has one."""
    tokens = take.take_number("tokens")
    finding = take_finding(schedule, take) if has_cutoff else None
    cutoffs = None if has_cutoff else take_cutoffs(schedule, take)
    hidden = schedule.take_chunk(take, tokens)
    y, width = schedule.take_rows(take, "y"), schedule.spec.hidden
    squares = _take_squares(schedule, take)

    def prepare(token: v.Expr) -> None:
        if cutoffs is not None:
            v.store(cutoffs, token, v.constant(NO_CUTOFF, "float32"), 1)
        if squares is not None:
            v.store(squares, token, v.constant(0.0, "float32"), 1)
        emit_quantize(hidden, token)
        emit_fill(y, v.let(token * width), width)

    emit_each_token(tokens, prepare)
    if finding is not None:
        finding(hidden, tokens)


def emit_end_ffn(schedule: Schedule, take: Parameters) -> None:
    """Write y to ``given``, in the order of the residual stream."""
    spec = schedule.spec
    tokens = take.take_number("tokens")
    y, given = schedule.take_rows(take, "y"), schedule.take_rows(take, "given")
    squares = _take_squares(schedule, take)

    def finish(token: v.Expr) -> None:
        base = v.let(token * spec.hidden)
        if squares is not None:
            emit_scale(y, base, spec.hidden, take_sub_norm_factor(spec, squares[token]))
        emit_fill(given, base, spec.hidden)
        emit_leave_lane_order(spec.hidden, spec.precision.ffn, y, given, token)

    emit_each_token(tokens, finish)


def emit_scale(target: v.Buffer, base: v.Expr, length: int, factor: v.Expr) -> None:
    """Multiply ``target[base : base + length]`` by ``factor``."""
    with T.serial(length // 16) as step:
        place = v.let(base + step * 16)
        v.store(target, place, v.load(target, place, 16) * v.splat(factor, 16), 16)


def take_sub_norm_factor(spec: KernelSpec, squares: v.Expr) -> v.Expr:
    """What normalises a layer's activations, of which ``squares`` is the sum of the squares."""
    mean = squares * v.constant(1.0 / spec.sub_norm, "float32")
    return v.let(v.constant(1.0, "float32") / T.sqrt(mean + v.constant(spec.epsilon, "float32")))


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


def emit_add_neurons(schedule: Schedule, take: Parameters, *, known: bool = False) -> None:
    """Add gathered neurons to y of one token; of ``known`` ones `predict_gate` has computed the
    gates, and found them open."""
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
