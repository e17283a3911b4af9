"""The function that predicts a layer's neurons before the layer's own input is known."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.ffn_block import take_beginning
from pi2.backends.kernels.norms import emit_normalize
from pi2.backends.kernels.parameters import emit_each_token
from pi2.backends.kernels.schedule import Schedule
from pi2.backends.kernels.selection import take_low_rank


def emit_foresee(schedule: Schedule, rank: int, take: Parameters) -> None:
    """Predict with what a layer to come would read of x; then begin the FFN of the present layer,
    whose input takes the place of the other one.

    Every token has the bits of ``begin_ffn`` and ``predict_low_rank`` of the one layer and
    ``begin_ffn`` of the other.
    """
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
