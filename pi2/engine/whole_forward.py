"""Sequences through a model that a unit has as a whole: tokens go in, logits come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.executor import CONTEXT_BLOCK, ContextKeeper
from pi2.backends.units import SequenceModel, WholeModel, WholeRequest
from pi2.engine.forward import Sequences, read_rows
from pi2.engine.loading import group_by_expert, open_reader
from pi2.engine.waves import NeuronCounters
from pi2.fitting import find_whole_backend
from pi2.memory.arena import allocate_cache, allocate_staging
from pi2.memory.budget import Budget
from pi2.memory.flash import FlashReader, NullReader
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_piece_bytes
from pi2.plan.weights.layout import round_up
from pi2.progress import Progress
from pi2.store.file_read import read_pieces
from pi2.store.reader import NeuronStore

_COPIED_TOKENS = 16 * CONTEXT_BLOCK


@runtime_checkable
class HiddenReader(Protocol):
    """A model that shows what its head reads."""

    def read_hidden(self, first: int) -> F32:
        """What the head reads of the last chunk's tokens from ``first`` on [n, hidden]; valid until
        the next call."""


class WholeForward(Sequences):
    """Gives chunks and steps to the unit, and counts the neurons that it has named."""

    def __init__(
        self,
        model: SequenceModel,
        *,
        chunk: int,
        context: int,
        sequences: int,
        step_neurons: int | None,
        has_states: bool = False,
    ) -> None:
        """``step_neurons``: those that may compute a token in all layers together; None where
        steps compute all of them; ``has_states``: whether layers keep states."""
        super().__init__(context=context, sequences=sequences, has_states=has_states)
        self._model = model
        self._chunk = chunk
        self._step_neurons = step_neurons
        self.counters = NeuronCounters()
        self.attended_tokens = 0
        """Tokens that those of steps have attended to, summed up."""
        self.steps = 0
        """Steps so far."""

    @property
    def copies(self) -> bool:
        return isinstance(self._model, ContextKeeper) and not self._has_states

    def copy(self, source: int, target: int) -> None:
        assert isinstance(self._model, ContextKeeper), "nothing can be copied"
        position = self.positions[source]
        self.go_on_from(target, position)
        for first in range(0, round_up(position, CONTEXT_BLOCK), _COPIED_TOKENS):
            end = min(round_up(position, CONTEXT_BLOCK), first + _COPIED_TOKENS)
            self._model.put_context(
                target, first, end, self._model.read_context(source, first, end)
            )

    def abandon(self) -> None:
        """Do nothing: whatever was begun ends by itself."""

    def prefill(
        self,
        tokens: I32,
        *,
        all_logits: bool = False,
        take: Callable[[F32], None] | None = None,
        progress: Callable[[float], None] = lambda share: None,
        end: int = 0,
        sequence: int = 0,
    ) -> F32:
        return self._read_prompt(
            tokens, self._model.logits, all_logits, take, progress, end, sequence
        )

    @property
    def shows_hidden(self) -> bool:
        """Whether `read_hidden` works."""
        return isinstance(self._model, HiddenReader)

    def read_hidden(self, tokens: I32, *, end: int = 0, sequence: int = 0) -> F32:
        """Process the next ``tokens`` of a sequence as `prefill` does; returns what the head reads
        of each, float32 [tokens, hidden]."""
        assert isinstance(self._model, HiddenReader)
        read = self._model.read_hidden
        return self._read_prompt(tokens, read, True, None, lambda share: None, end, sequence)

    def _read_prompt(
        self,
        tokens: I32,
        read: Callable[[int], F32],
        all_logits: bool,
        take: Callable[[F32], None] | None,
        progress: Callable[[float], None],
        end: int,
        sequence: int,
    ) -> F32:
        """What ``read`` gives of the chunks' tokens from a first one on: of all, or of the last."""
        parts: list[F32] = []
        self._model.expect(max(end, self.positions[sequence] + len(tokens)))
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            self._check_room(sequence, len(chunk))
            try:
                self._model.prefill(chunk, sequence, self.positions[sequence])
            except BaseException:
                self._interrupt([sequence])
                raise
            self.positions[sequence] += len(chunk)
            done = start + len(chunk)
            if all_logits or take is not None or done == len(tokens):
                parts += read_rows(read, len(chunk), all_logits, take)
            progress(done / len(tokens))
        return np.concatenate(parts if all_logits else parts[-1:])

    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        for sequence in set(sequences):
            self._check_room(sequence, sequences.count(sequence))
        positions = self._find_positions(sequences)
        self._model.expect(max(positions) + 1)
        try:
            logits = self._model.step(np.array(tokens, np.int32), sequences, positions)
        except BaseException:
            self._interrupt(sequences)
            raise
        self.steps += 1
        self.attended_tokens += sum(positions) + len(positions)
        for sequence in sequences:
            self.positions[sequence] += 1
        if self._step_neurons is not None:
            self.counters.predicted += self._model.count_named()
            self.counters.possible += self._step_neurons * len(tokens)
        return logits


def _build_whole(
    resolved: ResolvedPlan, grouped: Sequence[I32] | None, budget: Budget, progress: Progress
) -> WholeModel:
    """Make room for the model on the unit that has it; ``grouped``: a mixture's neurons, expert by
    expert."""
    plan, name = resolved.plan, resolved.sparse_unit
    backend = find_whole_backend(resolved.name_backend(name))
    assert backend is not None, name
    return backend.build_whole(
        WholeRequest(
            name=name,
            unit=resolved.device.units[name],
            model=resolved.model,
            bundle=resolved.bundle,
            chunk=plan.prefill.chunk,
            sequences=plan.decode.batch,
            context=plan.kv.context,
            kv_type=plan.kv.type,
            predictor=plan.decode.predictor,
            threshold=plan.decode.threshold,
            expert_neurons=None if plan.decode.predictor == "none" else grouped,
            count=partial(budget.charge, resolved.name_segment(name)),
            progress=progress,
        )
    )


def make_whole_forward(model: WholeModel, resolved: ResolvedPlan) -> WholeForward:
    """Return what takes sequences through the model."""
    plan = resolved.plan
    neurons = resolved.model.token_neurons
    return WholeForward(
        model,
        chunk=plan.prefill.chunk,
        context=plan.kv.context,
        sequences=plan.decode.batch,
        step_neurons=None if plan.decode.predictor == "none" else neurons,
        has_states=bool(resolved.model.state_layers),
    )


def load_whole(
    resolved: ResolvedPlan,
    store: NeuronStore | None,
    budget: Budget,
    cleanup: ExitStack,
    progress: Progress,
) -> tuple[WholeModel, FlashReader | NullReader]:
    """Make room for the model on the unit that has it, and bring it there; ``cleanup`` closes it
    and the reader of its neurons."""
    grouped = group_by_expert(resolved, store, budget)
    model = _build_whole(resolved, grouped, budget, progress)
    cleanup.callback(model.close)
    reader = open_reader(resolved, store, allocate_cache(resolved, budget))
    cleanup.callback(reader.close)
    if store is not None:
        store.check_unchanged()
        _copy_weights(model, resolved, store, reader, budget, progress)
    return model, reader


def _copy_weights(
    model: WholeModel,
    resolved: ResolvedPlan,
    store: NeuronStore,
    reader: FlashReader | NullReader,
    budget: Budget,
    progress: Progress,
) -> None:
    """Read dense tensors and neurons from flash, and give them to the unit; what is in main memory
    meanwhile are a piece of a tensor and staging buffers of neurons."""
    staging = allocate_staging(resolved, budget)
    buffer = budget.allocate("workspace", count_piece_bytes(resolved))
    names = [tensor.name for tensor in store.manifest.tensors]
    for tensor, first, share in read_pieces(store, names, buffer):
        model.put(tensor, first)
        progress("loading dense tensors", share)
    layers, neurons, size = len(resolved.layers), resolved.model.layer_neurons, staging.shape[1]
    for layer in range(layers):
        for first in range(0, neurons, size):
            piece = staging[0, : min(size, neurons - first)]
            reader.start_run(layer, first, piece).result()
            model.keep(layer, first, piece)
        progress(f"loading neurons of {resolved.sparse_unit}", (layer + 1) / layers)
