"""The functions of a layer with a state, from norm to residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.attention_block import MixingBlock
from pi2.backends.kernels.matrix import Matrix, emit_multiply
from pi2.backends.kernels.operands import Activations
from pi2.backends.kernels.scan import take_scan
from pi2.backends.kernels.schedule import Schedule, take_matrix
from pi2.backends.kernels.states import RankArrays, StateArrays, emit_state_mix
from pi2.model.states import StateShape

Store = Callable[[v.Expr, v.Expr, v.Expr], None]
"""Takes a token, a row of a product, and its value."""


def emit_state_attend(schedule: Schedule, take: Parameters) -> None:
    """Add the block of a layer with a state to x; the state is that after the last token."""
    block = _take_block(schedule, take, "tokens")
    block.emit_project()
    block.emit_mix(None, block.tokens)
    block.emit_output()


def emit_state_project(schedule: Schedule, take: Parameters) -> None:
    """Set the projections of the tokens of several sequences."""
    _take_block(schedule, take, "tokens").emit_project()


def emit_state_token(schedule: Schedule, take: Parameters) -> None:
    block = _take_block(schedule, take, "token")
    block.emit_mix(block.tokens, None)


def emit_state_output(schedule: Schedule, take: Parameters) -> None:
    """Add the mixer's outputs of all of them to x."""
    _take_block(schedule, take, "tokens").emit_output()


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateBlock(MixingBlock):
    gates: Matrix | None
    arrays: StateArrays

    def emit_project(self) -> None:
        """Normalise x; the projections of all tokens."""
        spec, isa, arrays = self.schedule.spec, self.schedule.isa, self.arrays
        shape, bias = arrays.shape, self.bias

        def store_projected(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            total = value if bias is None else value + bias[row]
            v.store(arrays.projected, arrays.find_row(token) + v.wide(row), total, 1)

        def store_gate(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
            # Step sizes alone come second, where decays are.
            skipped = shape.value_heads if shape.kind == "mamba" else 0
            v.store(arrays.gates, arrays.find_factors(token) + (row + skipped), value, 1)

        self.emit_input(store_projected)
        if self.gates is not None:
            store = _divide_ranks(arrays, store_gate)
            emit_multiply(isa, spec.threads, self.gates, self.hidden, self.tokens, store)

    def emit_mix(self, first: v.Expr | None, count: v.Expr | None) -> None:
        """Mix the first ``count`` tokens, or token number ``first``, which is at the position."""
        emit_state_mix(self.schedule, self.arrays, self.position, first, count)

    def emit_output(self) -> None:
        """Project the mixer's output and add it to x."""
        self.emit_add(self.arrays.mixed)


def _divide_ranks(arrays: StateArrays, store_gate: Store) -> Store:
    """Return the storing function for rows of ``state_gates``: ``store_gate``, or, for latents of
    decays and gates, one that writes to their own place."""
    shape = arrays.shape
    parts: list[tuple[int, Activations, int]] = []
    end = shape.gates
    for own, rank in ((arrays.output_gates, shape.gate_rank), (arrays.decays, shape.decay_rank)):
        if own is not None:
            end -= rank
            parts.append((end, own.ranks, rank))

    def store(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        emit_from(0, token, row, value)

    def emit_from(number: int, token: v.Expr, row: v.Expr, value: v.Expr) -> None:
        if number == len(parts):
            store_gate(token, row, value)
            return
        first, ranks, _ = parts[number]
        with T.If(row >= first):
            with T.Then():
                place = v.wide(token) * ranks.length + v.wide(row - first)
                v.store(ranks.values, place, value, 1)
            with T.Else():
                emit_from(number + 1, token, row, value)

    return store


def _take_block(schedule: Schedule, take: Parameters, number: str) -> _StateBlock:
    """Declare the parameters; ``number`` names the first: how many tokens, or which."""
    spec, shape = schedule.spec, schedule.spec.state
    assert shape is not None
    tokens = take.take_number(number)
    position = take.take_number("position")
    context = take.take_number("context")
    x = schedule.take_rows(take, "x")
    before = schedule.take_rows(take, "before") if spec.keeps_input else None
    norm = schedule.take_input_norm(take)
    project = take_matrix(take, "state_in", shape.rows, spec.hidden, spec.precision.attention)
    gates = None
    if shape.gates:
        gates = take_matrix(take, "state_gates", shape.gates, spec.hidden, "fp16")
    output = take_matrix(
        take, "state_output", spec.hidden, shape.stored_width, spec.precision.attention
    )
    bias = output_bias = output_norm = None
    if shape.projection_bias:
        bias = take.take_array("state_in_bias", "float32", shape.rows)
        output_bias = take.take_array("state_output_bias", "float32", spec.hidden)
    if spec.norm.outputs:
        output_norm = take.take_array("output_norm", "float32", spec.hidden)
    count = tokens if number == "tokens" else context
    hidden = schedule.take_chunk(take, "hidden", spec.hidden, count)
    mixed = schedule.take_chunk(take, "state_mixed", shape.stored_width, count)
    return _StateBlock(
        schedule=schedule,
        tokens=tokens,
        position=position,
        x=x,
        before=before,
        norm=norm,
        project=project,
        bias=bias,
        gates=gates,
        output=output,
        output_bias=output_bias,
        output_norm=output_norm,
        hidden=hidden,
        arrays=_take_arrays(take, shape, mixed),
    )


def _take_arrays(take: Parameters, shape: StateShape, mixed: Activations) -> StateArrays:

    def take_vector(name: str, length: int, there: bool = True) -> v.Buffer | None:
        return take.take_array(f"state_{name}", "float32", length) if there else None

    def take_ranks(name: str, rows: int, length: int) -> RankArrays | None:
        if not length:
            return None
        ranks = take.take_array(f"state_{name}_ranks", "float32", "tokens", length)
        return RankArrays(
            ranks=mixed.keep_values(ranks, length),
            matrix=take_matrix(take, f"state_{name}", rows, length, "fp16"),
        )

    heads, scans = shape.value_heads, shape.kind == "mamba1"
    recurs = shape.kind != "convolution" and not scans
    projected = take.take_array("state_projected", "float32", "tokens", shape.entries)
    gates = take.take_array("state_factors", "float32", "tokens", max(1, shape.factors))
    memory = take.take_array("state_memory", "float32", max(1, shape.memory))
    return StateArrays(
        shape=shape,
        projected=projected,
        gates=gates,
        mixed=mixed,
        tail=take.take_array("state_tail", "float32", max(1, shape.kept)),
        memory=memory,
        convolution=take.take_array("state_convolution", "float32", shape.kernel, shape.channels),
        convolution_bias=take_vector("convolution_bias", shape.channels, shape.convolution_bias),
        decay=take_vector("decay", heads, recurs),
        step=take_vector("step", shape.decays, recurs),
        skip=take_vector("skip", heads, shape.kind == "mamba"),
        norm=take_vector("norm", shape.width if shape.kind == "mamba" else shape.value_dim, recurs),
        scan=take_scan(take, shape, mixed, projected, gates, memory) if scans else None,
        decays=take_ranks("decays", shape.decays, shape.stored_decay_rank),
        output_gates=take_ranks("output_gates", shape.width, shape.stored_gate_rank),
    )
