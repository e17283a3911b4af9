"""Memory of the context that no token has needed yet, lent to the cache of cold neurons.

Keys and values take their whole segment only when the context is full.  Until then cold neurons
lie in what is left; the ones that are needed least go as tokens come, a step at a time, and the
room is theirs again when a new sequence begins.  What stays in memory is never read again.
"""

from __future__ import annotations

from collections.abc import Callable

from pi2.memory.cache import NeuronCache
from pi2.memory.context import ContextMemory

STEP_TOKENS = 64
"""The cache gives memory back for so many tokens at once."""


class ContextLoan:
    """Makes the cold cache larger and smaller as the context demands."""

    def __init__(
        self,
        cache: NeuronCache,
        memory: ContextMemory,
        *,
        cold_slots: int,
        release: Callable[[], None],
        never_wanted: int = 0,
    ) -> None:
        """``cold_slots`` that the cache has for itself; ``release`` lets the system have what keys
        and values take; ``never_wanted``: neurons that nobody ever looks for in the cache, because
        units keep them."""
        self._cache = cache
        self._memory = memory
        self._cold_slots = cold_slots
        self._release = release
        self._never_wanted = never_wanted
        self._claimed = 0

    def count_slots(self, tokens: int) -> int:
        """Cold slots while there are at most ``tokens``."""
        cache = self._cache
        absent = cache.absent_capacity - self._never_wanted
        lent = self._memory.count_unused(tokens) // int(cache.arena.shape[1])
        return min(absent, self._cold_slots + lent)

    def claim(self, tokens: int) -> None:
        """Make room for the keys and values of ``tokens`` in all; nothing may be held."""
        if tokens > self._claimed:
            steps = -(-tokens // STEP_TOKENS) * STEP_TOKENS
            self._claimed = min(steps, self._memory.context)
            self._cache.resize_cold(self.count_slots(self._claimed))

    def begin(self) -> None:
        """Begin anew: keys and values of all sequences are forgotten."""
        if self._claimed:
            self._claimed = 0
            self._release()
            self._cache.resize_cold(self.count_slots(0))
