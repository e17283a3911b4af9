"""The functions of a compiled library: which of them a spec has, and what makes them differ.

Each declares its parameters by name, type and shape where its TensorIR is (``emit_...``); executors
bind arrays to these names.  Arrays of type uint8 may lie anywhere; the others are 64-byte aligned.
Activations are ``NAME_codes``, ``NAME_scales``, ``NAME_sums``, ``NAME_values`` and ``NAME_tiles``
(`operands.Activations`).  If scales are resident, an array of them follows every array of bundles,
``rows`` say which belong to gathered neurons, and ``first`` which belongs to the first of some
neighbours.  Attention of another kind than the first has functions whose names end with its
number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import make_target
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.attention_block import (
    emit_attend,
    emit_attend_mix,
    emit_attend_mix_tokens,
    emit_attend_output,
    emit_attend_project,
)
from pi2.backends.kernels.ffn_block import (
    emit_add_dense,
    emit_add_neurons,
    emit_add_open_neurons,
    emit_add_plain_neurons,
    emit_add_shared_neurons,
    emit_add_stretches,
    emit_begin_cut_ffn,
    emit_begin_ffn,
    emit_end_ffn,
    emit_find_gates,
    take_beginning,
)
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.latent_block import (
    emit_latent_attend,
    emit_latent_mix,
    emit_latent_output,
    emit_latent_project,
)
from pi2.backends.kernels.norms import emit_normalize
from pi2.backends.kernels.schedule import Schedule, emit_each_token
from pi2.backends.kernels.selection import emit_predict_gate, emit_predict_low_rank, take_low_rank
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.state_block import (
    emit_state_attend,
    emit_state_output,
    emit_state_project,
    emit_state_token,
)
from pi2.backends.kernels.vocabulary import (
    emit_add_positions,
    emit_embed,
    emit_embed_layers,
    emit_logits,
)


def emit_foresee(schedule: Schedule, rank: int, take: Parameters) -> None:
    """Predict with what a layer to come would read of x; then begin the FFN of the present layer,
    whose input takes the place of the other one.

    Every token has the bits of ``begin_ffn`` and ``predict_low_rank`` of the one layer and
    ``begin_ffn`` of the other."""
    spec = schedule.spec
    neurons = take.take_number("neurons")
    threshold = take.take_number("threshold", "float32")
    tokens = take.take_number("tokens") if spec.sequences else None
    x = schedule.take_rows(take, "x")
    hidden = schedule.take_hidden(take, neurons)
    next_norm = schedule.take_input_norm(take, "next_norm")
    predict = take_low_rank(schedule, rank, take, neurons, threshold, hidden)
    begin = take_beginning(schedule, take, x, schedule.take_input_norm(take), hidden)

    def look_ahead(token: v.Expr) -> None:
        emit_normalize(spec, x, token, next_norm, hidden, token)

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
        spec = self.spec
        schedule = Schedule(spec, self.isa)
        neurons = Schedule(spec.describe_neurons(), self.isa)
        functions: dict[str, Callable[[Schedule, Parameters], None]] = {
            "embed": emit_embed,
            "begin_ffn": emit_begin_ffn,
            "end_ffn": emit_end_ffn,
            "logits": emit_logits,
        }
        of_neurons: dict[str, Callable[[Schedule, Parameters], None]] = {
            "add_dense": emit_add_dense
        }
        if spec.attention.latent is not None:
            functions["attend"] = emit_latent_attend
        elif not spec.divides_attention:
            functions["attend"] = emit_attend
        if spec.takes_stretches:
            of_neurons["add_neurons"] = emit_add_stretches
        elif spec.has_gathered_ffn:
            of_neurons["add_neurons"] = emit_add_neurons
        if spec.closes_gates:
            of_neurons["find_gates"] = emit_find_gates
        if spec.has_plain_ffn:
            of_neurons["add_plain_neurons"] = emit_add_plain_neurons
        if spec.model.layer_embedding is not None:
            functions["embed_layers"] = emit_embed_layers
        if spec.cutoff_rows:
            functions["begin_cut_ffn"] = emit_begin_cut_ffn
        if spec.model.positions is not None:
            functions["add_positions"] = emit_add_positions
        if spec.uses_known_gates:
            of_neurons["add_open_neurons"] = emit_add_open_neurons
        bound: dict[str, Callable[[Parameters], None]] = {
            name: partial(emit, schedule) for name, emit in functions.items()
        }
        bound |= {name: partial(emit, neurons) for name, emit in of_neurons.items()}
        blocks = [Schedule(own, self.isa) for own in spec.list_blocks()]
        others = dict(list(enumerate(blocks))[1:])
        if spec.divides_attention:
            bound["attend_own_project"] = partial(emit_attend_project, schedule)
            bound["attend_mix_tokens"] = partial(emit_attend_mix_tokens, schedule)
            bound["attend_own_output"] = partial(emit_attend_output, schedule)
        for number, other in others.items():
            if spec.divides_attention:
                bound[f"attend_mix_tokens_{number}"] = partial(emit_attend_mix_tokens, other)
            else:
                bound[f"attend_{number}"] = partial(emit_attend, other)
        # Of several sequences, every token is computed as it would be alone.
        step = schedule.for_step()
        neurons_of_step = neurons.for_step()
        named = neurons_of_step if spec.sequences else neurons
        for rank in spec.ranks:
            bound[f"predict_low_rank_{rank}"] = partial(emit_predict_low_rank, named, rank)
            if spec.foresees:
                bound[f"foresee_{rank}"] = partial(emit_foresee, named, rank)
        if spec.gates:
            bound["predict_gate"] = partial(emit_predict_gate, named)
        if spec.state is not None:
            bound["state_attend"] = partial(emit_state_attend, schedule)
        if not spec.sequences:
            return bound
        if spec.state is not None:
            bound["state_attend_project"] = partial(emit_state_project, step)
            bound["state_attend_mix"] = partial(emit_state_token, step)
            bound["state_attend_output"] = partial(emit_state_output, step)
        if spec.attention.latent is not None:
            bound["attend_project"] = partial(emit_latent_project, step)
            bound["attend_mix"] = partial(emit_latent_mix, step)
            bound["attend_output"] = partial(emit_latent_output, step)
        else:
            bound["attend_project"] = partial(emit_attend_project, step)
            bound["attend_mix"] = partial(emit_attend_mix, step)
            bound["attend_output"] = partial(emit_attend_output, step)
        for number, other in others.items():
            other = other.for_step()
            bound[f"attend_mix_{number}"] = partial(emit_attend_mix, other)
            if spec.has_other_heads(number):
                bound[f"attend_project_{number}"] = partial(emit_attend_project, other)
                bound[f"attend_output_{number}"] = partial(emit_attend_output, other)
        if spec.shares_neurons:
            bound["add_shared_neurons"] = partial(emit_add_shared_neurons, neurons_of_step)
        if spec.has_other_chunks:
            bound["begin_step"] = partial(emit_begin_ffn, step)
            if spec.cutoff_rows:
                bound["begin_cut_step"] = partial(emit_begin_cut_ffn, step)
            bound["add_dense_step"] = partial(emit_add_dense, neurons_of_step)
            if spec.multiplies_at_end:
                bound["end_step"] = partial(emit_end_ffn, step)
            if spec.model.layer_embedding is not None:
                bound["embed_layers_step"] = partial(emit_embed_layers, step)
        return bound
