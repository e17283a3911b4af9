"""The functions of a compiled library: which of them a spec has, and what makes them differ.

Each declares its parameters by name, type and shape where its TensorIR is (``emit_...``); executors
bind arrays to these names.  Arrays of type uint8 may lie anywhere; the others are 64-byte aligned.
Activations are ``NAME_codes``, ``NAME_scales``, ``NAME_sums`` and ``NAME_values``
(`operands.Activations`).  If scales are resident, an array of them follows every array of bundles,
``rows`` say which belong to gathered neurons, and ``first`` which belongs to the first of some
neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm

from pi2.backends.compiler.compile import make_target
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.ffn_block import (
    emit_add_dense,
    emit_add_neurons,
    emit_add_shared_neurons,
    emit_begin_ffn,
    emit_end_ffn,
    emit_find_gates,
)
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.schedule import Schedule
from pi2.backends.kernels.selection import emit_predict_gate, emit_predict_low_rank
from pi2.backends.kernels.spec import KernelSpec


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
        spec, schedule = self.spec, Schedule(self.spec)
        step = schedule.for_step()
        # Of several sequences, every token is computed as it would be alone.
        named = step if spec.sequences else schedule
        functions: dict[str, Callable[[Parameters], None]] = {
            "begin_ffn": partial(emit_begin_ffn, schedule),
            "add_neurons": partial(emit_add_neurons, schedule),
            "add_dense": partial(emit_add_dense, schedule),
            "end_ffn": partial(emit_end_ffn, schedule),
        }
        if spec.closes_gates:
            functions["find_gates"] = partial(emit_find_gates, schedule)
        if spec.cutoff_rows:
            functions["begin_cut_ffn"] = partial(emit_begin_ffn, schedule, has_cutoff=True)
        if spec.uses_known_gates:
            functions["add_open_neurons"] = partial(emit_add_neurons, schedule, known=True)
        for rank in spec.ranks:
            functions[f"predict_low_rank_{rank}"] = partial(emit_predict_low_rank, named, rank)
        if spec.gates:
            functions["predict_gate"] = partial(emit_predict_gate, named)
        if spec.shares_neurons:
            functions["add_shared_neurons"] = partial(emit_add_shared_neurons, step)
        if spec.sequences and spec.has_other_chunks:
            functions["begin_step"] = partial(emit_begin_ffn, step)
            if spec.cutoff_rows:
                functions["begin_cut_step"] = partial(emit_begin_ffn, step, has_cutoff=True)
            functions["add_dense_step"] = partial(emit_add_dense, step)
        return functions
