"""Who guesses the tokens that come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pi2.arrays import I64

MOST_CANDIDATES = 8
"""Earlier places of the last tokens that are compared, the latest first."""
MOST_COMMON = 32
"""Tokens before such a place that are compared, at most."""


class Drafter(Protocol):
    """Guesses tokens.  One caller at a time."""

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """Guess up to ``most`` tokens that follow ``ids`` [n], those of the sequence in ``place``:
        its prompt, and what was drawn so far, of which the last one has not been through the
        model."""

    def forget(self, place: int) -> None:
        """Take notice that another sequence will have ``place``."""


class _Index:
    """Where the tokens of a sequence stand."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], list[int]] = {}
        """Ends of the places of every few tokens that follow each other."""
        self.next = 0
        """First end that is not in it."""


class PromptLookup:
    """Guesses what came after the last tokens where they stood before."""

    def __init__(self, match: int) -> None:
        """``match``: last tokens that must have come before."""
        self._match = match
        self._indexes: dict[int, _Index] = {}

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """See `Drafter`.  Of several earlier places, the one that has most tokens before it in
        common counts, and of equally good ones the latest."""
        index, match = self._indexes.setdefault(place, _Index()), self._match
        first = max(match, index.next)
        tail = ids[first - match :].tolist()
        # What ends with the last token has nothing after it.
        for end in range(first, len(ids)):
            last = end - first + match
            index.ends.setdefault(tuple(tail[last - match : last]), []).append(end)
        index.next = len(ids)
        ends = index.ends.get(tuple(ids[-match:].tolist()), [])
        latest = ends[: -MOST_CANDIDATES - 1 : -1]
        best = max(latest, key=lambda end: _count_common(ids, end), default=len(ids))
        found: list[int] = ids[best : best + most].tolist()
        return found

    def forget(self, place: int) -> None:
        """See `Drafter`."""
        self._indexes.pop(place, None)


def _count_common(ids: I64, end: int) -> int:
    """Tokens before ``end`` that are those at the end of ``ids``."""
    count = min(end, MOST_COMMON)
    differ = np.flatnonzero(ids[end - count : end] != ids[len(ids) - count :])
    return count - 1 - int(differ[-1]) if len(differ) else count
