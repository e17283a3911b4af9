"""A dense unit that keeps nothing and answers zeros, for dry runs."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.dense_unit import UnitObserver, UnitRequest


class NullUnit:
    """A `pi2.backends.dense_unit.DenseUnit` without arithmetic."""

    busy_s = 0.0

    def __init__(self, request: UnitRequest) -> None:
        self._rows = {name: tensor.rows for name, tensor in request.matrices.items()}
        self._jobs: dict[int, F32] = {}
        self._next = 0

    def offer_room(self, layer: int) -> None:
        """Offer nothing."""

    def keep(self, layer: int, first: int, bundles: U8) -> None:
        """Forget the neurons."""

    def start(
        self, layer: int, inputs: F32, routes: F32 | None = None, neurons: int | None = None
    ) -> int:
        """Note how large the sum is."""
        number, self._next = self._next, self._next + 1
        self._jobs[number] = np.zeros(inputs.shape, np.float32)
        return number

    def multiply(self, name: str, inputs: F32) -> int:
        """Note how many products there are."""
        number, self._next = self._next, self._next + 1
        self._jobs[number] = np.zeros((len(inputs), self._rows[name]), np.float32)
        return number

    def add(self, job: int, bundles: U8, first: int) -> None:
        """Leave the neurons out."""

    def wait(self, job: int) -> None:
        """Return at once."""

    def finish(self, job: int) -> F32:
        """Return zeros."""
        return self._jobs.pop(job)

    def give_up(self) -> None:
        """Forget all jobs."""
        self._jobs.clear()

    def observe(self, observer: UnitObserver | None) -> None:
        """There is nothing to tell of."""

    def close(self) -> None:
        """There is nothing to give back."""
