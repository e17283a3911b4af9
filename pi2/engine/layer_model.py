"""A model that an executor computes layer by layer, and neurons of layers as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32

if TYPE_CHECKING:
    from pi2.backends.executor import Executor, ExecutorObserver
    from pi2.engine.dense_shares import SharedRows
    from pi2.engine.feed_forward import FeedForward
    from pi2.store.file_read import EmbeddingRows


class LayerModel:
    """`pi2.backends.units.SequenceModel`: calls the executor in order, layer by layer."""

    def __init__(
        self,
        executor: Executor,
        feed_forward: FeedForward,
        *,
        layers: int,
        chunk: int,
        rows: SharedRows | None = None,
        embedding: EmbeddingRows | None = None,
        layer_embedding: EmbeddingRows | None = None,
        is_single: bool = True,
        neuron_bytes: int = 0,
    ) -> None:
        """``chunk``: tokens that go through a layer together; ``rows``: computes projections and
        head, if not the executor; ``embedding``: reads its rows if they are not in memory;
        ``layer_embedding``: reads rows of the layers' own; ``is_single``: whether every step is a
        token of the only sequence; ``neuron_bytes``: that computing a neuron touches."""
        self.executor, self.program = executor, executor.program
        self.feed_forward = feed_forward
        self._rows = rows or executor
        self._layers = layers
        self._chunk = chunk
        self._embedding, self._layer_embedding = embedding, layer_embedding
        self._is_single = is_single
        self._neuron_bytes = neuron_bytes
        self._chunks = 1
        """Chunks of the last piece; 1 of a step."""
        self._given: F32 | None = None

    def expect(self, end: int) -> None:
        self.program.expect(end)

    def abandon(self) -> None:
        """Forget work in progress; the neuron cache keeps its content."""
        self._given = None
        self.feed_forward.abandon()

    def observe(self, observer: ExecutorObserver | None) -> None:
        self.executor.observe(observer)

    @property
    def waited_s(self) -> float:
        return self.feed_forward.waited_s

    @property
    def touched_bytes(self) -> int:
        return self.feed_forward.counters.touched * self._neuron_bytes

    def count_work(self) -> Mapping[str, float | None]:
        return self.feed_forward.count_work()

    def join(self, given: F32) -> None:
        self._given = given

    def logits(self, first: int) -> F32:
        return self._rows.logits(self._select_row(first))

    def read_head_input(self, first: int) -> F32:
        return self.executor.read_head_input(self._select_row(first))

    def _select_row(self, first: int) -> int:
        """Select the chunk of a piece's token; return its row there."""
        if self._chunks == 1:
            return first
        number, row = divmod(first, self._chunk)
        self.executor.select_chunk(number)
        return row

    def prefill(
        self, tokens: I32, sequence: int, position: int, progress: Callable[[float], None]
    ) -> None:
        executor, feed_forward = self.executor, self.feed_forward
        if not self._is_single:
            executor.select_sequence(sequence)
        places = range(0, len(tokens), self._chunk)
        self._chunks = len(places)
        feed_forward.begin_prompt()
        for number, first in enumerate(places):
            executor.select_chunk(number)
            self._embed(tokens[first : first + self._chunk])
        for number, first in enumerate(places):
            executor.select_chunk(number)
            self._rows.attend(0, position + first)
        for layer in range(self._layers):
            for number in feed_forward.run_dense(layer, len(places)):
                # Other chunks may still be computed by another unit.
                if layer + 1 < self._layers:
                    self._rows.attend(layer + 1, position + places[number])
            if len(places) > 1:
                progress((layer + 1) / self._layers)

    def _embed(self, tokens: I32) -> None:
        self.executor.embed(self._find_rows(tokens))
        self._join(len(tokens))

    def _join(self, count: int) -> None:
        if self._given is not None:
            self.executor.join(self._given[:count])
            self._given = self._given[count:] if len(self._given) > count else None

    def _find_rows(self, tokens: I32) -> I32:
        """Rows of the embedding that the executor has; layers' own embeddings are read as well."""
        if self._layer_embedding is not None:
            self._layer_embedding.load(tokens)
        return tokens if self._embedding is None else self._embedding.load(tokens)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        executor, feed_forward, rows = self.executor, self.feed_forward, self._rows
        self._chunks = 1
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
            rows.attend(layer, positions[0])
            if is_dense:
                for _ in feed_forward.run_dense(layer):
                    pass
            else:
                feed_forward.run_sparse(layer)
        if names:
            feed_forward.end_token()
        logits = rows.logits(0)
        if len(logits) == len(tokens):
            return logits
        parts = [logits.copy()]
        while (done := sum(map(len, parts))) < len(tokens):
            parts.append(rows.logits(done).copy())
        return np.concatenate(parts)
