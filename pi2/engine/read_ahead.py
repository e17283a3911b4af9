"""Whether looking ahead pays, as tokens show: for a while some look ahead and some do not.

Guesses that are wrong cost reads, and where the drive is the bottleneck, time; those that are right
let it work while others compute.  Which of both is more depends on the drive, the model and what
is in memory, so it is measured while the model runs.
"""

from __future__ import annotations

import statistics

FIRST_TOKENS = 32
"""Before that many the cache is not yet as it will be."""
TRIAL_TOKENS = 8
"""Tokens with, and as many without, whose times are compared."""
AGAIN_TOKENS = 256
"""After so many it is tried again."""
GAIN = 0.02
"""Share of a token's time that not looking ahead must save."""


class ReadAhead:
    """Decides token by token."""

    def __init__(self, *, is_measured: bool = True) -> None:
        """``is_measured``: whether times decide; else every token looks ahead."""
        self.is_on = True
        self._is_measured = is_measured
        self._until = FIRST_TOKENS
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._is_trial = False
        self.idle_tokens = 0
        """Tokens that have not looked ahead because it did not pay."""

    def end_token(self, seconds: float) -> None:
        """Take note of what a token took."""
        if not self._is_measured:
            return
        if self._is_trial:
            self._times[self.is_on].append(seconds)
        elif not self.is_on:
            self.idle_tokens += 1
        self._until -= 1
        if self._until:
            return
        if not self._is_trial:
            self._is_trial, self.is_on, self._until = True, True, TRIAL_TOKENS
        elif self.is_on:
            self.is_on, self._until = False, TRIAL_TOKENS
        else:
            on, off = (statistics.median(self._times[state]) for state in (True, False))
            self.is_on = off > (1 - GAIN) * on
            self._is_trial, self._until = False, AGAIN_TOKENS
            self._times = {True: [], False: []}
