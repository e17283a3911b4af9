"""A model that is nowhere and answers zeros, for dry runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.observer import ExecutorObserver
from pi2.backends.protocol import Tensor
from pi2.backends.whole_model import WholeRequest
from pi2.plan.arithmetic.sizes import LOGIT_ROWS


class NullModel:
    """A `pi2.backends.whole_model.WholeModel` without arithmetic."""

    busy_s = 0.0

    def __init__(self, request: WholeRequest) -> None:
        self._vocab = request.model.shape.vocab
        self._tokens = 0

    def put(self, tensor: Tensor, first: int) -> None:
        """Forget the rows."""

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Forget the neurons."""

    def expect(self, end: int) -> None:
        """There is nothing to prepare."""

    def prefill(self, tokens: I32, sequence: int, position: int) -> None:
        """Note how many tokens there are."""
        self._tokens = len(tokens)

    def logits(self, first: int) -> F32:
        """Return zeros."""
        return np.zeros((min(self._tokens - first, LOGIT_ROWS), self._vocab), np.float32)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        """Return zeros."""
        return np.zeros((len(tokens), self._vocab), np.float32)

    def count_named(self) -> int:
        """Return none: nothing is predicted."""
        return 0

    def observe(self, observer: ExecutorObserver | None) -> None:
        """There is nothing to tell of."""

    def close(self) -> None:
        """There is nothing to give back."""
