"""One sequence through the model: prompts in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import Executor
from pi2.diagnostics import UserError
from pi2.engine.feed_forward import FeedForward

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
        context: int,
    ) -> None:
        self._executor = executor
        self._feed_forward = feed_forward
        self._layers = layers
        self._chunk = chunk
        self._context = context
        self.position = 0
        """Tokens whose keys and values are kept."""

    def reset(self) -> None:
        """Begin a new sequence; the neuron cache keeps its content."""
        self._feed_forward.abandon()
        self.position = 0

    def prefill(
        self,
        tokens: I32,
        *,
        all_logits: bool = False,
        progress: Callable[[float], None] = lambda share: None,
    ) -> F32:
        """Process ``tokens`` [n], n >= 1, densely in chunks; ``progress`` is told the share done.

        Returns the logits after the last one, [1, vocab], or of all, [n, vocab], as a copy.
        """
        parts = []
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            last = start + len(chunk) == len(tokens)
            self._check_room(len(chunk))
            self._run(chunk, dense=True)
            progress((start + len(chunk)) / len(tokens))
            if all_logits or last:
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
        self._run(np.array([token], np.int32), dense=self._feed_forward.decode_is_dense())
        logits: F32 = self._executor.logits(0)[0]
        return logits

    def _check_room(self, count: int) -> None:
        if self.position + count > self._context:
            raise UserError.of(
                "P602",
                f"the sequence needs more than the {self._context} tokens of kv.context",
                help="raise kv.context and memory.segments.kv, or shorten the prompt",
            )

    def _run(self, tokens: I32, *, dense: bool) -> None:
        executor, feed_forward = self._executor, self._feed_forward
        try:
            executor.embed(tokens)
            for layer in range(self._layers):
                if dense:
                    executor.attend(layer, self.position)
                    feed_forward.run_dense(layer)
                else:
                    feed_forward.prepare_sparse(layer)
                    executor.attend(layer, self.position)
                    feed_forward.run_sparse(layer)
            if not dense:
                feed_forward.end_token()
        except BaseException:
            feed_forward.abandon()
            raise
        self.position += len(tokens)
