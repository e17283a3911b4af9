"""What a replacement policy of the cold-neuron cache is, and the policies by their names.

Every policy is vectorised: a request of n neurons costs a few array operations, no Python loop
per neuron.  ``cache`` calls ``touch`` and then, for what is missing, ``replace``; nothing that was
touched in a request is replaced in the same request.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from pi2.arrays import F32, I32, I64, Bits

ABSENT = -1

PolicyName = Literal["lfu", "lru"]


class Policy(Protocol):
    """Decides which of ``capacity`` slots are given to neurons that come.

    A *key* names a neuron of the model: layer x neurons per layer + stored index.
    """

    def touch(self, slots: I32, keys: I64) -> None:
        """Begin a request that finds ``keys`` [n] (distinct) in ``slots`` [n]."""

    def replace(self, keys: I64, held: Bits) -> I32:
        """Return distinct slots [n] for ``keys`` [n], which are absent.

        Empty slots go first.  A slot that was touched in this request, or is ``held``
        [capacity], is not given away; the caller asks for no more than there are others.
        """

    def adopt(self, keys: I64, order: I32) -> None:
        """Begin anew: slot i holds ``keys[i]`` (ABSENT: it is empty); ``order`` has all slots,
        that of the neuron that is needed least first."""

    def drop(self, slots: I32) -> None:
        """``slots`` [n] are empty now."""

    def list_order(self) -> I32:
        """All slots, that of the neuron that is needed least first."""

    def renumber(self, source: I32, keys: I64) -> None:
        """Slot i is from now on what slot ``source[i]`` was (ABSENT: a new one), and holds
        ``keys[i]`` (ABSENT: it is empty)."""


def carry_over(values: I64, source: I32, empty: int) -> I64:
    """``values[source]``, and ``empty`` where ``source`` is ABSENT."""
    result = np.full(len(source), empty, np.int64)
    known = source != ABSENT
    result[known] = values[source[known]]
    return result


def make_policy(name: PolicyName, capacity: int, keys: int, expected: F32 | None = None) -> Policy:
    """Make the policy that a plan names, with ``capacity`` empty slots for ``keys`` neurons.

    ``expected`` [keys]: how often each is expected to be used per token, where that is known.
    """
    # Imported here, because the policies share the types above.
    from pi2.memory.frequency import LeastFrequentlyUsed
    from pi2.memory.recency import LeastRecentlyUsed

    if name == "lru":
        return LeastRecentlyUsed(capacity)
    return LeastFrequentlyUsed(capacity, keys, expected)
