"""Sequences through the model: prompts in chunks, then token by token, one or several at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.executor import (
    CONTEXT_BLOCK,
    ContextKeeper,
    InputJoiner,
    LengthAware,
    RowDivider,
    StateKeeper,
)
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import round_up
from pi2.records import dataclass, field

if TYPE_CHECKING:
    from pi2.backends.protocol import Executor
    from pi2.engine.dense_shares import WholeRows
    from pi2.engine.feed_forward import FeedForward
    from pi2.memory.arena import ContextLoan
    from pi2.store.file_read import EmbeddingRows


class Sequences(ABC):
    """Holds the position in every sequence; what derives from it computes."""

    def __init__(
        self,
        *,
        context: int,
        sequences: int,
        loan: ContextLoan | None = None,
        has_states: bool = False,
    ) -> None:
        """``context``: tokens of each sequence; ``loan``: lent context memory; ``has_states``:
        failed steps change states."""
        self._context = context
        self._loan = loan
        self.positions = [0] * sequences
        """Tokens of each sequence that are in the KV cache."""
        self._touched = [0] * sequences
        """Most tokens that each has had since all of them were empty."""
        self._has_states = has_states
        self._interrupted: set[int] = set()
        """Sequences whose states some layers have taken further than others."""
        self.attended_tokens = 0
        """Sum over all tokens of steps: the tokens that each attended to."""
        self.steps = 0

    @property
    def position(self) -> int:
        """Tokens of the first sequence that are in the KV cache."""
        return self.positions[0]

    def reset(self, sequence: int = 0) -> None:
        """Begin a new sequence in the place of another."""
        self.abandon()
        self.positions[sequence] = 0
        self._interrupted.discard(sequence)
        if self._loan is not None and not any(self.positions):
            self._touched = [0] * len(self.positions)
            self._loan.begin()

    def go_on_from(self, sequence: int, position: int) -> None:
        """Continue a sequence after its first ``position`` tokens, which its KV cache has."""
        if position == 0:
            self.reset(sequence)
            return
        self.abandon()
        self.positions[sequence] = 0
        self._interrupted.discard(sequence)
        self._check_room(sequence, position)
        self.positions[sequence] = position

    def reset_all(self) -> None:
        for sequence in range(len(self.positions)):
            self.reset(sequence)

    @abstractmethod
    def abandon(self) -> None:
        """Forget work that has begun and not ended."""

    @abstractmethod
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
        """Process ``tokens`` [n] densely in chunks of a prompt of ``end`` tokens; ``take`` gets
        logits a few rows at a time. Returns the last logits [1, vocab], or all [n, vocab],
        copied."""

    def decode(self, token: int) -> F32:
        """Process one token of the first sequence; logits [vocab], valid until the next call."""
        logits: F32 = self.step([token], [0])[0]
        return logits

    @abstractmethod
    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        """Process ``tokens`` of ``sequences``, a repeated sequence having several; logits [n,
        vocab], valid until the next call."""

    @property
    def copies(self) -> bool:
        return False

    def copy(self, source: int, target: int) -> None:
        raise AssertionError("nothing can be copied")

    def mark(self, sequence: int) -> None:
        """Let steps of a sequence that follow be taken back."""
        assert self.positions[sequence] > 0, "a prompt cannot be taken back"

    def take_back(self, sequence: int, position: int) -> None:
        """Forget the tokens of a sequence from ``position`` on, which came since `mark`."""
        self.positions[sequence] = position

    def _find_positions(self, sequences: Sequence[int]) -> list[int]:
        if len(sequences) == 1:
            return [self.positions[sequences[0]]]
        following: dict[int, int] = {}
        found = []
        for sequence in sequences:
            position = following.get(sequence, self.positions[sequence])
            found.append(position)
            following[sequence] = position + 1
        return found

    def _interrupt(self, sequences: Sequence[int]) -> None:
        """Give up the work under way in ``sequences``; states cannot be taken back."""
        if self._has_states:
            self._interrupted.update(sequences)
        self.abandon()

    def _check_room(self, sequence: int, count: int) -> None:
        """UserError P602 if a sequence has no room for ``count`` tokens more, P616 if it was
        interrupted and cannot go on."""
        if sequence in self._interrupted:
            raise UserError.of(
                "P616",
                "this sequence was interrupted, and its layers' states are of different tokens",
                help="begin it anew",
            )
        end = self.positions[sequence] + count
        if end > self._context:
            raise UserError.of(
                "P602",
                f"the sequence needs more than the {self._context} tokens of kv.context",
                help="raise kv.context and memory.segments.kv, or shorten the prompt",
            )
        if self._loan is not None:
            self._touched[sequence] = max(self._touched[sequence], end)
            self._loan.claim(sum(self._touched))


def tell_share(
    progress: Callable[[float], None], before: int, count: int, total: int, share: float
) -> None:
    """Report the share of ``total`` tokens that is done, with ``share`` of these ``count``."""
    progress((before + count * share) / total)


def read_rows(
    read: Callable[[int], F32], count: int, all_rows: bool, take: Callable[[F32], None] | None
) -> list[F32]:
    """Copies of the rows that ``read`` gives of a chunk's ``count`` tokens, some from a first one
    on: of all, or of the last; ``take`` is given all of them."""
    parts, first = [], 0 if all_rows or take is not None else count - 1
    while first < count:
        rows = read(first)
        first += len(rows)
        if take is not None:
            take(rows)
        if all_rows or first == count:
            parts.append((rows if all_rows else rows[-1:]).copy())
    return parts


COPIED_TOKENS = 16 * CONTEXT_BLOCK
"""Tokens of the KV cache that are copied at once."""


@dataclass(slots=True)
class _Mark:
    position: int
    state: F32
    """Copy of the states of its layers."""
    tokens: list[int] = field(default_factory=list)
    """Tokens read since."""


class Forward(Sequences):
    """Calls the executor in order, layer by layer."""

    def __init__(
        self,
        executor: Executor,
        feed_forward: FeedForward,
        *,
        layers: int,
        chunk: int,
        chunks: int = 1,
        context: int,
        sequences: int = 1,
        rows: WholeRows,
        loan: ContextLoan | None = None,
        embedding: EmbeddingRows | None = None,
        layer_embedding: EmbeddingRows | None = None,
        has_states: bool = False,
        step_tokens: int = 1,
    ) -> None:
        """``chunk``: tokens that go through a layer together; ``chunks``: chunks of a prompt that
        go through a layer one after the other before the next layer begins; ``context``: tokens of
        each of the ``sequences`` that there is room for; ``rows``: computes projections and head;
        ``loan``: context memory that is lent while it is unused; ``embedding``: reads its rows if
        they are not in memory; ``layer_embedding``: reads rows of the layers' own embedding;
        ``has_states``: whether layers keep states, which a failed step has changed;
        ``step_tokens``: most tokens of a step."""
        super().__init__(context=context, sequences=sequences, loan=loan, has_states=has_states)
        self._executor = executor
        self._rows = rows
        self._expect = executor.expect if isinstance(executor, LengthAware) else lambda end: None
        self._feed_forward = feed_forward
        self._layers = layers
        self._chunk = chunk
        self._chunks = chunks
        self._embedding = embedding
        self._layer_embedding = layer_embedding
        self._is_single = max(sequences, step_tokens) == 1
        """Whether every step is a token of the only sequence."""
        self._marks: dict[int, _Mark] = {}
        """Positions to which sequences with states may be taken back."""
        self.watch: Callable[[int, int, I32, F32], None] | None = None
        """Called with sequence, first position, tokens that went through the layers, and what the
        head reads of them [n, hidden].  Needs a `RowDivider`."""
        self.given: F32 | None = None
        """Of an MTP head, what the main model's head reads of the next tokens [n, hidden]."""

    def abandon(self) -> None:
        """Forget work in progress; the neuron cache keeps its content."""
        self._feed_forward.abandon()

    def reset(self, sequence: int = 0) -> None:
        super().reset(sequence)
        self._marks.pop(sequence, None)

    def go_on_from(self, sequence: int, position: int) -> None:
        self._marks.pop(sequence, None)
        super().go_on_from(sequence, position)

    @property
    def copies(self) -> bool:
        executor = self._executor
        has_keeper = not self._has_states or isinstance(executor, StateKeeper)
        return isinstance(executor, ContextKeeper) and has_keeper

    def copy(self, source: int, target: int) -> None:
        executor, position = self._executor, self.positions[source]
        assert isinstance(executor, ContextKeeper), "nothing can be copied"
        self.go_on_from(target, position)
        whole = round_up(position, CONTEXT_BLOCK)
        for first in range(0, whole, COPIED_TOKENS):
            end = min(whole, first + COPIED_TOKENS)
            executor.put_context(target, first, end, executor.read_context(source, first, end))
        if self._has_states:
            assert isinstance(executor, StateKeeper)
            executor.put_state(target, executor.read_state(source))

    def mark(self, sequence: int) -> None:
        super().mark(sequence)
        if self._has_states:
            assert isinstance(self._executor, StateKeeper), "states cannot be taken back"
            state = self._executor.read_state(sequence)
            self._marks[sequence] = _Mark(self.positions[sequence], state)

    def take_back(self, sequence: int, position: int) -> None:
        """See `pi2.engine.forward.Sequences`; states go on from the mark once more."""
        if position == self.positions[sequence]:
            return
        super().take_back(sequence, position)
        if not self._has_states:
            return
        assert isinstance(self._executor, StateKeeper)
        mark = self._marks[sequence]
        self._executor.put_state(sequence, mark.state)
        self.positions[sequence] = mark.position
        kept, mark.tokens = mark.tokens[: position - mark.position], []
        if kept:
            self._run_step(np.array(kept, np.int32), [sequence] * len(kept))

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
        read = self._rows.compute_logits
        return self._read_prompt(tokens, read, all_logits, take, progress, end, sequence)

    def read_hidden(self, tokens: I32, *, end: int = 0, sequence: int = 0) -> F32:
        """Process ``tokens`` as `prefill` does; the head's inputs [tokens, hidden], zero-padded.
        Needs a `RowDivider`."""
        assert isinstance(self._executor, RowDivider)
        read = self._executor.read_head_input
        return self._read_prompt(tokens, read, True, None, lambda share: None, end, sequence)

    def _read_prompt(
        self,
        tokens: I32,
        read: Callable[[int], F32],
        all_rows: bool,
        take: Callable[[F32], None] | None,
        progress: Callable[[float], None],
        end: int,
        sequence: int,
    ) -> F32:
        """What ``read`` gives of the chunks' tokens from a first one on: of all, or of the last."""
        parts: list[F32] = []
        size = self._chunk * self._chunks
        if len(self.positions) > 1:
            self._executor.select_sequence(sequence)
        self._expect(max(end, self.positions[sequence] + len(tokens)))
        for start in range(0, len(tokens), size):
            together = tokens[start : start + size]
            self._check_room(sequence, len(together))
            chunks = [
                together[first : first + self._chunk]
                for first in range(0, len(together), self._chunk)
            ]
            tell = partial(tell_share, progress, start, len(together), len(tokens))
            self._run_dense(chunks, sequence, tell)
            for number, chunk in enumerate(chunks):
                last = start + len(together) == len(tokens) and number == len(chunks) - 1
                if all_rows or take is not None or last:
                    self._executor.select_chunk(number)
                    parts += read_rows(read, len(chunk), all_rows, take)
        return np.concatenate(parts if all_rows else parts[-1:])

    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        for sequence in set(sequences):
            self._check_room(sequence, sequences.count(sequence))
        self._run_step(np.array(tokens, np.int32), sequences)
        logits = self._rows.compute_logits(0)
        if len(logits) == len(sequences):
            return logits
        parts = [logits.copy()]
        while (done := sum(map(len, parts))) < len(sequences):
            parts.append(self._rows.compute_logits(done).copy())
        return np.concatenate(parts)

    def _run_dense(
        self, chunks: Sequence[I32], sequence: int, progress: Callable[[float], None]
    ) -> None:
        """Take ``chunks`` of a sequence through every layer before the next layer."""
        executor, feed_forward = self._executor, self._feed_forward
        try:
            feed_forward.begin_prompt()
            for number, tokens in enumerate(chunks):
                executor.select_chunk(number)
                self._embed(tokens)
            places = self.positions[sequence] + np.cumsum([0, *map(len, chunks)])
            for number in range(len(chunks)):
                executor.select_chunk(number)
                self._rows.attend(0, int(places[number]))
            for layer in range(self._layers):
                for number in feed_forward.run_dense(layer, len(chunks)):
                    # Other chunks may still be computed by another unit.
                    if layer + 1 < self._layers:
                        self._rows.attend(layer + 1, int(places[number]))
                if len(chunks) > 1 or layer + 1 == self._layers:
                    progress((layer + 1) / self._layers)
            if self.watch is not None:
                for number, tokens in enumerate(chunks):
                    executor.select_chunk(number)
                    inputs = self.read_inputs(len(tokens))
                    self.watch(sequence, int(places[number]), tokens, inputs)
        except BaseException:
            self._interrupt([sequence])
            raise
        self.positions[sequence] += sum(len(tokens) for tokens in chunks)

    def _embed(self, tokens: I32) -> None:
        self._executor.embed(self._find_rows(tokens))
        self._join(len(tokens))

    def _join(self, count: int) -> None:
        """Join embeddings of ``count`` tokens with what an MTP head is given."""
        if self.given is not None:
            assert isinstance(self._executor, InputJoiner)
            self._executor.join(self.given[:count])
            self.given = self.given[count:]

    def read_inputs(self, count: int) -> F32:
        """What the head reads of the ``count`` tokens of the last chunk or step [count, hidden]."""
        assert isinstance(self._executor, RowDivider)
        return np.concatenate(read_rows(self._executor.read_head_input, count, True, None))

    def _find_rows(self, tokens: I32) -> I32:
        """Rows of the embedding that the executor has; layers' own embeddings are read as well."""
        if self._layer_embedding is not None:
            self._layer_embedding.load(tokens)
        return tokens if self._embedding is None else self._embedding.load(tokens)

    def _run_step(self, tokens: I32, sequences: Sequence[int]) -> None:
        """Take the next ``tokens`` of ``sequences`` through every layer."""
        executor, feed_forward = self._executor, self._feed_forward
        positions = self._find_positions(sequences)
        self._expect(max(positions) + 1)
        try:
            if self._is_single:
                executor.select_chunk(0)
                self._embed(tokens)
            else:
                executor.begin_step(self._find_rows(tokens), sequences, positions)
                self._join(len(tokens))
            feed_forward.begin_step(len(tokens))
            names = False
            for layer in range(self._layers):
                is_dense = feed_forward.decode_is_dense(layer)
                names |= not is_dense
                if not is_dense:
                    feed_forward.prepare_sparse(layer)
                if self._is_single:
                    self._rows.attend(layer, positions[0])
                else:
                    self._rows.attend_step(layer)
                if is_dense:
                    for _ in feed_forward.run_dense(layer):
                        pass
                else:
                    feed_forward.run_sparse(layer)
            if names:
                feed_forward.end_token()
            if self.watch is not None:
                inputs = self.read_inputs(len(tokens))
                for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
                    own = slice(row, row + 1)
                    self.watch(sequence, position, tokens[own], inputs[own])
        except BaseException:
            self._interrupt(sequences)
            raise
        self.steps += 1
        self.attended_tokens += sum(positions) + len(positions)
        for token, sequence in zip(tokens.tolist(), sequences, strict=True):
            self.positions[sequence] += 1
            if sequence in self._marks:
                self._marks[sequence].tokens.append(token)
