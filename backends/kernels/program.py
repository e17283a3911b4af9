"""The functions of a compiled library: which of them a spec has, and what makes them differ.

Each declares its parameters by name, type and shape where its TensorIR is (``emit_...``); executors
bind arrays to these names.  Arrays of type uint8 may lie anywhere; the others are 64-byte aligned.
Activations are ``NAME_codes``, ``NAME_scales``, ``NAME_sums``, ``NAME_values`` and ``NAME_tiles``
(`operands.Activations`).  If scales are resident, an array of them follows every array of bundles,
``rows`` say which belong to gathered neurons, and ``first`` which belongs to the first of some
neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import make_target
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.ffn_block import (
    emit_add_dense,
    emit_add_neurons,
    emit_add_open_neurons,
    emit_add_plain_neurons,
    emit_add_shared_neurons,
    emit_begin_cut_ffn,
    emit_begin_ffn,
    emit_end_ffn,
    emit_find_gates,
    take_beginning,
)
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_quantize
from pi2.backends.kernels.schedule import Schedule, emit_each_token
from pi2.backends.kernels.selection import emit_predict_gate, emit_predict_low_rank, take_low_rank
from pi2.backends.kernels.spec import KernelSpec


def emit_foresee(schedule: Schedule, rank: int, take: Parameters) -> None:
    """Predict with what a layer to come would read of x (``ahead``); then begin the neurons of the
    present layer, whose input takes the place of the other one.

    Every token has the bits of ``begin_ffn`` and ``predict_low_rank`` of the one layer and
    ``begin_ffn`` of the other."""
    spec = schedule.spec
    neurons = take.take_number("neurons")
    threshold = take.take_number("threshold", "float32")
    tokens = take.take_number("tokens") if spec.sequences else None
    ahead = schedule.take_rows(take, "ahead", "sequences")
    hidden = schedule.take_hidden(take, neurons)
    later = replace(hidden, values=ahead)
    predict = take_low_rank(schedule, rank, take, neurons, threshold, later)
    begin = take_beginning(schedule, take, hidden)

    def look_ahead(token: v.Expr) -> None:
        emit_quantize(later, token)

    if tokens is None:
        look_ahead(T.int32(0))
        predict(None)
        begin(T.int32(0))
        return
    emit_each_token(tokens, look_ahead)
    predict((T.int32(0), tokens))
    emit_each_token(tokens, begin)


def read_program(text: str) -> Program:
    """Return the program of the spec that ``text`` is the JSON of."""
    return Program(KernelSpec.from_json(text))


class Program:
    """The functions for one spec."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.isa: Isa = spec.isa

    @property
    def target(self) -> tvm.target.Target:
        return make_target(self.isa)

    def list_functions(self) -> dict[str, Callable[[Parameters], None]]:
        """Return what emits each function, by name."""
        spec, schedule = self.spec, Schedule(self.spec, self.isa)
        functions: dict[str, Callable[[Schedule, Parameters], None]] = {
            "begin_ffn": emit_begin_ffn,
            "add_dense": emit_add_dense,
            "end_ffn": emit_end_ffn,
        }
        if spec.has_gathered_ffn:
            functions["add_neurons"] = emit_add_neurons
        if spec.closes_gates:
            functions["find_gates"] = emit_find_gates
        if spec.has_plain_ffn:
            functions["add_plain_neurons"] = emit_add_plain_neurons
        if spec.cutoff_rows:
            functions["begin_cut_ffn"] = emit_begin_cut_ffn
        if spec.uses_known_gates:
            functions["add_open_neurons"] = emit_add_open_neurons
        bound: dict[str, Callable[[Parameters], None]] = {
            name: partial(emit, schedule) for name, emit in functions.items()
        }
        # Of several sequences, every token is computed as it would be alone.
        step = schedule.for_step()
        named = step if spec.sequences else schedule
        for rank in spec.ranks:
            bound[f"predict_low_rank_{rank}"] = partial(emit_predict_low_rank, named, rank)
            if spec.foresees:
                bound[f"foresee_{rank}"] = partial(emit_foresee, named, rank)
        if spec.gates:
            bound["predict_gate"] = partial(emit_predict_gate, named)
        if spec.shares_neurons:
            bound["add_shared_neurons"] = partial(emit_add_shared_neurons, step)
        if spec.sequences and spec.has_other_chunks:
            bound["begin_step"] = partial(emit_begin_ffn, step)
            if spec.cutoff_rows:
                bound["begin_cut_step"] = partial(emit_begin_cut_ffn, step)
            bound["add_dense_step"] = partial(emit_add_dense, step)
        return bound
