"""Runs given tokens through a model that nothing is generated from: logits and embeddings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.protocol import RowDivider
from pi2.engine.forward import Forward
from pi2.engine.parts import Parts
from pi2.engine.scheduler import Scheduler
from pi2.engine.whole_forward import WholeForward


def iterate_prefill_logits(
    parts: Parts, scheduler: Scheduler, ids: I32
) -> Generator[F32, None, None]:
    """Logits [n, vocab] after ``ids`` [tokens], chunk by chunk, every neuron computed."""
    chunk = parts.resolved.plan.prefill.chunk
    with scheduler.borrow_place() as place:
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            with scheduler.exclude():
                found = parts.forward.prefill(piece, all_logits=True, end=len(ids), sequence=place)
            yield found


def iterate_decode_logits(
    parts: Parts, scheduler: Scheduler, ids: I32
) -> Generator[F32, None, None]:
    """Logits [1, vocab] after each of ``ids`` [tokens], with the plan's predictor."""
    with scheduler.borrow_place() as place:
        for token in ids.tolist():
            with scheduler.exclude():
                found = parts.forward.step([token], [place]).copy()
            yield found


def find_hidden_reader(parts: Parts) -> Forward | WholeForward | None:
    """What gives hidden states: a dry run has no numbers, and a GPU that has the model as a whole
    gives logits only."""
    if isinstance(parts.forward, WholeForward):
        return parts.forward if parts.forward.shows_hidden else None
    if parts.store is None or not isinstance(parts.forward, Forward):
        return None
    return parts.forward if isinstance(parts.executor, RowDivider) else None


def embed_tokens(
    parts: Parts,
    forward: Forward | WholeForward,
    scheduler: Scheduler,
    ids: Sequence[int],
    pooling: Literal["mean", "last"],
) -> F32:
    """The mean of what the head would read after ``ids``, or the last of it: [hidden], length 1."""
    tokens, chunk = np.array(ids, np.int32), parts.resolved.plan.prefill.chunk
    width = parts.resolved.model.shape.hidden
    total = np.zeros(width, np.float64)
    with scheduler.borrow_place() as place:
        for start in range(0, len(tokens), chunk):
            with scheduler.exclude():
                found = forward.read_hidden(
                    tokens[start : start + chunk], end=len(tokens), sequence=place
                )
            hidden = found[:, :width].astype(np.float64)
            total = total + hidden.sum(axis=0) if pooling == "mean" else hidden[-1]
    length = float(np.linalg.norm(total))
    return (total / length if length else total).astype(np.float32)
