"""One sequence through the model: prompts in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import Executor, LengthAware
from pi2.diagnostics import UserError
from pi2.engine.feed_forward import FeedForward
from pi2.memory.lending import ContextLoan
from pi2.store.embedding_rows import EmbeddingRows

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class Forward:
    """Holds the position in the sequence and calls the executor in order."""

    def __init__(
        self,
        executor: Executor,
        feed_forward: FeedForward,
        *,
        layers: int,
        chunk: int,
        chunks: int = 1,
        context: int,
        loan: ContextLoan | None = None,
        embedding: EmbeddingRows | None = None,
    ) -> None:
        """``chunk``: tokens that go through a layer together; ``chunks``: chunks of a prompt that
        go through a layer one after the other before the next layer begins; ``loan``: memory of the
        context that is lent while it is not used; ``embedding``: what reads its rows, where it is
        not in memory."""
        self._executor = executor
        self._expect = executor.expect if isinstance(executor, LengthAware) else lambda end: None
        self._feed_forward = feed_forward
        self._layers = layers
        self._chunk = chunk
        self._chunks = chunks
        self._context = context
        self._loan = loan
        self._embedding = embedding
        self.position = 0
        """Tokens whose keys and values are kept."""

    def reset(self) -> None:
        """Begin a new sequence; the neuron cache keeps its content."""
        self._feed_forward.abandon()
        self.position = 0
        if self._loan is not None:
            self._loan.begin()

    def prefill(
        self,
        tokens: I32,
        *,
        all_logits: bool = False,
        progress: Callable[[float], None] = lambda share: None,
        end: int = 0,
    ) -> F32:
        """Process ``tokens`` [n], n >= 1, densely in chunks; ``progress`` is told the share done.

        ``end``: tokens of the whole prompt, where ``tokens`` are a part of it.

        Returns the logits after the last one, [1, vocab], or of all, [n, vocab], as a copy.
        """
        parts = []
        size = self._chunk * self._chunks
        self._expect(max(end, self.position + len(tokens)))
        for start in range(0, len(tokens), size):
            together = tokens[start : start + size]
            self._check_room(len(together))
            chunks = [
                together[first : first + self._chunk]
                for first in range(0, len(together), self._chunk)
            ]
            self._run_dense(chunks, partial(_tell, progress, start, len(together), len(tokens)))
            for number, chunk in enumerate(chunks):
                last = start + len(together) == len(tokens) and number == len(chunks) - 1
                if all_logits or last:
                    self._executor.select_chunk(number)
                    first = 0 if all_logits else len(chunk) - 1
                    while first < len(chunk):
                        parts.append(self._executor.logits(first).copy())
                        first += len(parts[-1])
        return np.concatenate(parts)

    def decode(self, token: int) -> F32:
        """Process one token with the plan's predictor.

        Returns its logits [vocab], valid until the next call.
        """
        self._check_room(1)
        self._expect(self.position + 1)
        tokens = np.array([token], np.int32)
        if self._feed_forward.decode_is_dense():
            self._run_dense([tokens])
        else:
            self._run_sparse(tokens)
        logits: F32 = self._executor.logits(0)[0]
        return logits

    def _check_room(self, count: int) -> None:
        if self.position + count > self._context:
            raise UserError.of(
                "P602",
                f"the sequence needs more than the {self._context} tokens of kv.context",
                help="raise kv.context and memory.segments.kv, or shorten the prompt",
            )
        if self._loan is not None:
            self._loan.claim(self.position + count)

    def _run_dense(
        self, chunks: Sequence[I32], progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Take ``chunks`` through every layer before the next layer."""
        executor, feed_forward = self._executor, self._feed_forward
        try:
            for number, tokens in enumerate(chunks):
                executor.select_chunk(number)
                self._embed(tokens)
            for layer in range(self._layers):
                position = self.position
                for number, tokens in enumerate(chunks):
                    executor.select_chunk(number)
                    executor.attend(layer, position)
                    position += len(tokens)
                feed_forward.run_dense(layer, len(chunks))
                if len(chunks) > 1 or layer + 1 == self._layers:
                    progress((layer + 1) / self._layers)
        except BaseException:
            feed_forward.abandon()
            raise
        self.position += sum(len(tokens) for tokens in chunks)

    def _embed(self, tokens: I32) -> None:
        rows = self._embedding
        self._executor.embed(tokens if rows is None else rows.load(tokens))

    def _run_sparse(self, tokens: I32) -> None:
        executor, feed_forward = self._executor, self._feed_forward
        try:
            executor.select_chunk(0)
            self._embed(tokens)
            for layer in range(self._layers):
                feed_forward.prepare_sparse(layer)
                executor.attend(layer, self.position)
                feed_forward.run_sparse(layer)
            feed_forward.end_token()
        except BaseException:
            feed_forward.abandon()
            raise
        self.position += len(tokens)


def _tell(
    progress: Callable[[float], None], before: int, count: int, total: int, share: float
) -> None:
    """Report the share of ``total`` tokens that is done, with ``share`` of these ``count``."""
    progress((before + count * share) / total)
