"""The model itself guesses, with the neurons that are in memory alone."""

from __future__ import annotations

from pi2.arrays import I64
from pi2.engine.feed_forward import FeedForward
from pi2.engine.sequences import Sequences


class ResidentDrafts:
    """Guesses the likeliest token after the other, as the model does that reads nothing."""

    def __init__(self, forward: Sequences, feed_forward: FeedForward) -> None:
        self._forward = forward
        self._feed_forward = feed_forward

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """See `pi2.engine.drafting.Drafter`; the place is left as it was."""
        forward, found = self._forward, [int(ids[-1])]
        position = forward.positions[place]
        forward.mark(place)
        with self._feed_forward.leave_out_missing():
            for _ in range(most):
                logits = forward.step(found[-1:], [place])[0]
                found.append(int(logits.argmax()))
        forward.take_back(place, position)
        return found[1:]

    def forget(self, place: int) -> None:
        """See `pi2.engine.drafting.Drafter`."""
