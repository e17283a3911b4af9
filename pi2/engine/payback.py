"""Whether guessing tokens pays, by what steps with and without guesses touch and take.

Tokens that are verified together touch more neurons than one does, and only those that are kept
count.  How many that are depends on the text, so it is measured while the model runs.  Bytes do
not depend on what else the machine does; seconds show what bytes do not.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW_STEPS = 16
"""Last steps that are compared."""
PLAIN_STEPS = 4
"""Steps without guesses before the first guess."""
TRIAL_STEPS = 8
"""Steps with guesses before it is decided."""
REFRESH_STEPS = 24
"""After so many steps with guesses in a row, one goes without: contexts grow."""
FIRST_REST = 32
"""Steps that rest when it did not pay; twice as many each time that it does not again."""
LONGEST_REST = 512
GAIN = 0.05
"""Share of bytes and of seconds that guessing must save to be taken up again; it is given up where
it saves nothing."""
FLASH_WEIGHT = 10
"""Bytes in memory that count as much as one from flash: drives give a tenth of what memory gives,
or less.  Guesses of what is in memory touch more there, so that less is read."""


class Touched(NamedTuple):
    """Bytes that steps have touched."""

    memory: int
    flash: int

    @property
    def total(self) -> int:
        """Bytes in all: what comes from flash is touched there and in memory."""
        return self.memory + self.flash

    @property
    def weight(self) -> int:
        """What steps are compared by."""
        return self.memory + FLASH_WEIGHT * self.flash


@dataclass(slots=True)
class _Window:
    """The last steps of a kind."""

    steps: deque[tuple[int, Touched, float]] = field(
        default_factory=lambda: deque(maxlen=WINDOW_STEPS)
    )
    """Tokens that were kept, bytes that were touched, seconds."""

    def find_weight(self) -> float:
        """Weight of the bytes for each token that was kept."""
        return sum(step[1].weight for step in self.steps) / max(1, self._count())

    def find_seconds(self) -> float:
        """Seconds for each; a few steps that the machine has disturbed do not count."""
        median = statistics.median(step[2] for step in self.steps)
        return median * len(self.steps) / max(1, self._count())

    def _count(self) -> int:
        return sum(step[0] for step in self.steps)


class Payback:
    """Decides for steps of as many sequences as there are."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether steps may have guesses."""
        self._plain = _Window()
        self._drafted = _Window()
        self._is_tried = False
        """Whether it is on to see whether it pays again."""
        self._in_row = 0
        """Steps with guesses since the last one without."""
        self._resting = 0
        """Steps that are still to rest."""
        self._rest = FIRST_REST

    def wants_draft(self) -> bool:
        """Whether the next step should have guesses, if there are any."""
        if not self.is_on or len(self._plain.steps) < PLAIN_STEPS:
            return False
        return self._in_row < REFRESH_STEPS

    def note(self, *, drafted: bool, tokens: int, touched: Touched, seconds: float) -> None:
        """Take note of a step: of ``tokens`` that were kept."""
        window = self._drafted if drafted else self._plain
        window.steps.append((tokens, touched, seconds))
        if drafted:
            self._in_row += 1
            self._decide()
            return
        self._in_row = 0
        if not self.is_on:
            self._resting -= 1
            if self._resting <= 0:
                self.is_on = self._is_tried = True
                self._drafted = _Window()

    def _decide(self) -> None:
        if len(self._drafted.steps) < TRIAL_STEPS:
            return
        most = 1 - GAIN if self._is_tried else 1.0
        if (
            self._drafted.find_weight() < most * self._plain.find_weight()
            and self._drafted.find_seconds() < most * self._plain.find_seconds()
        ):
            self._is_tried, self._rest = False, FIRST_REST
            return
        self.is_on, self._resting = False, self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
