"""Sequences through a model that a unit has as a whole: tokens go in, logits come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.executor import CONTEXT_BLOCK, ContextKeeper
from pi2.engine.forward import Sequences, read_rows
from pi2.engine.statistics import NeuronCounters
from pi2.plan.weights.layout import round_up

if TYPE_CHECKING:
    from pi2.backends.units import SequenceModel, WholeModel
    from pi2.plan.arithmetic.resolved import ResolvedPlan

_COPIED_TOKENS = 16 * CONTEXT_BLOCK


@runtime_checkable
class HiddenReader(Protocol):
    """A model that shows what its head reads."""

    def read_hidden(self, first: int) -> F32:
        """Head inputs of the chunk's tokens from ``first`` on [n, hidden], until the next call."""


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
        """``step_neurons``: neurons that may compute a token in all layers together; None if steps
        compute all of them; ``has_states``: whether layers keep states."""
        super().__init__(context=context, sequences=sequences, has_states=has_states)
        self._model = model
        self._chunk = chunk
        self._step_neurons = step_neurons
        self.counters = NeuronCounters()

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
        """Do nothing: work that has begun ends by itself."""

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


def make_whole_forward(model: WholeModel, resolved: ResolvedPlan) -> WholeForward:
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
