"""Predictions of a layer's neurons before the layer's own input is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pi2.arrays import F32, I32
from pi2.backends.protocol import Executor, Foreseer


class Foresight:
    """What an executor predicts ahead: in one call where it can, else with its other calls."""

    def __init__(
        self,
        executor: Executor,
        threshold: float,
        *,
        select_tokens: Callable[[], Iterable[int]],
        has_experts: bool,
        needs_scores: bool,
    ) -> None:
        """``select_tokens`` lets the executor's calls be about one token of the step after the
        other; ``has_experts``: whether the model is a mixture; ``needs_scores``: whether `read` has
        to tell scores."""
        self._executor = executor
        self._threshold = threshold
        self._select_tokens = select_tokens
        self._has_experts = has_experts
        self._needs_scores = needs_scores
        self._foreseer = executor if isinstance(executor, Foreseer) and executor.foresees else None
        self.experts: list[I32] = []
        """Experts of each token, in a mixture, that the last prediction is about."""
        self._found: list[tuple[I32, F32 | None]] = []
        """What was predicted for each token, where no call does it at once."""

    def predict(self, following: int, layer: int, tokens: int) -> None:
        """Predict the neurons of the layer ``following`` for all ``tokens`` of a step, by what it
        would read now; then begin the FFN of ``layer``."""
        executor = self._executor
        if self._foreseer is not None:
            self._foreseer.foresee(following, layer, self._threshold)
            return
        executor.begin_ffn(following)
        select = self._select_tokens
        if self._has_experts:
            self.experts = [executor.list_experts().copy() for _ in select()]
        self._found = [self._predict_token(following, tokens) for _ in select()]
        if layer != following:
            executor.begin_ffn(layer)

    def _predict_token(self, layer: int, tokens: int) -> tuple[I32, F32 | None]:
        named = self._executor.predict_low_rank(layer, self._threshold)
        scores = self._executor.read_scores() if self._needs_scores else None
        if tokens == 1:
            return named, scores
        # They are valid until the prediction of the next token.
        return named.copy(), None if scores is None else scores.copy()

    def read(self, token: int) -> tuple[I32, F32 | None]:
        """Return the stored indices that were predicted for ``token``, which is selected, and the
        scores [neurons] of the layer, where they are needed; valid until the next prediction."""
        if self._foreseer is None:
            return self._found[token]
        named = self._foreseer.list_foreseen()
        return named, self._executor.read_scores() if self._needs_scores else None
