"""Sequences through the model layer by layer, with prompts in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32
from pi2.engine.sequences import Sequences

if TYPE_CHECKING:
    from pi2.backends.protocol import Executor
    from pi2.engine.dense_shares import WholeRows
    from pi2.engine.feed_forward import FeedForward
    from pi2.memory.arena import ContextLoan
    from pi2.store.file_read import EmbeddingRows


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
        super().__init__(
            context=context,
            sequences=sequences,
            piece=chunk * chunks,
            computer=executor,
            loan=loan,
            has_states=has_states,
        )
        self._executor = executor
        self._rows = rows
        self._feed_forward = feed_forward
        self._layers = layers
        self._chunk = chunk
        self._embedding = embedding
        self._layer_embedding = layer_embedding
        self._is_single = max(sequences, step_tokens) == 1
        """Whether every step is a token of the only sequence."""

    def abandon(self) -> None:
        """Forget work in progress; the neuron cache keeps its content."""
        self._feed_forward.abandon()

    def run_piece(
        self, tokens: I32, sequence: int, progress: Callable[[float], None]
    ) -> Sequence[int]:
        if len(self.positions) > 1:
            self._executor.select_sequence(sequence)
        chunks = [
            tokens[first : first + self._chunk] for first in range(0, len(tokens), self._chunk)
        ]
        self._run_dense(chunks, sequence, progress)
        return list(map(len, chunks))

    def select_chunk(self, number: int) -> None:
        self._executor.select_chunk(number)

    def read_logits(self, first: int) -> F32:
        return self._rows.compute_logits(first)

    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        for sequence in set(sequences):
            self._check_room(sequence, sequences.count(sequence))
        self._read(np.array(tokens, np.int32), sequences)
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
            for number, tokens in enumerate(chunks if self.watch is not None else ()):
                executor.select_chunk(number)
                self._show_chunk(sequence, int(places[number]), tokens)
        except BaseException:
            self._interrupt([sequence])
            raise
        self.positions[sequence] += sum(len(tokens) for tokens in chunks)

    def _embed(self, tokens: I32) -> None:
        self._executor.embed(self._find_rows(tokens))
        self._join(len(tokens))

    def _find_rows(self, tokens: I32) -> I32:
        """Rows of the embedding that the executor has; layers' own embeddings are read as well."""
        if self._layer_embedding is not None:
            self._layer_embedding.load(tokens)
        return tokens if self._embedding is None else self._embedding.load(tokens)

    def _read(self, tokens: I32, sequences: Sequence[int]) -> None:
        executor, feed_forward = self._executor, self._feed_forward
        positions = self._find_positions(sequences)
        self.expect(max(positions) + 1)
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
            self._show_step(sequences, positions, tokens)
        except BaseException:
            self._interrupt(sequences)
            raise
        self._note_step(tokens, sequences, positions)
