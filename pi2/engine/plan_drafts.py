"""Another, smaller model guesses."""

from __future__ import annotations

import numpy as np

from pi2.arrays import I64
from pi2.engine.sequences import Sequences


class PlanDrafts:
    """Guesses the likeliest tokens of another model, which reads what the first one has."""

    def __init__(self, forward: Sequences, context: int) -> None:
        """``forward``: the other model's; it has a place for each that may be guessed for.
        ``context``: tokens that its places have room for."""
        self._forward = forward
        self._context = context
        self._known: list[I64] = [np.empty(0, np.int64) for _ in forward.positions]
        """Tokens that it has in each place."""

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """See `pi2.engine.drafting.Drafter`; nothing for places or contexts that it has not."""
        if place >= len(self._known) or len(ids) - 1 + most > self._context:
            return []
        self._catch_up(place, ids)
        found = [int(ids[-1])]
        for _ in range(most):
            logits = self._forward.step(found[-1:], [place])[0]
            found.append(int(logits.argmax()))
        self._known[place] = np.concatenate([ids, np.array(found[1:-1], np.int64)])
        return found[1:]

    def _catch_up(self, place: int, ids: I64) -> None:
        """Let the other model read all but the last token."""
        known = self._known[place]
        count = min(len(known), len(ids) - 1)
        differ = np.flatnonzero(known[:count] != ids[:count])
        common = int(differ[0]) if len(differ) else count
        self._forward.go_on_from(place, common)
        if common < len(ids) - 1:
            missing = ids[common:-1].astype(np.int32)
            self._forward.prefill(missing, end=len(ids) - 1, sequence=place)

    def forget(self, place: int) -> None:
        """See `pi2.engine.drafting.Drafter`."""
        if place < len(self._known):
            self._known[place] = np.empty(0, np.int64)
            self._forward.reset(place)
