"""Keys and values of prompts that were read before: what the scheduler asks about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pi2.arrays import I32
from pi2.engine.sequences import Sequences


class Prefixes(Protocol):
    """Knows what is in the places of sequences.  One caller at a time."""

    def choose_place(self, free: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
        """Choose one of the places ``free`` for a prompt, and bring there what is known of its
        keys and values; return it, and how many tokens of the prompt need not be read."""

    def choose_empty(self, free: Sequence[int]) -> int:
        """Choose one of the places ``free``, and empty it."""

    def note_copy(self, source: int, target: int) -> None:
        """Take notice that one place has what the other one has."""

    def note_prompt(self, place: int, ids: I32) -> None:
        """Take notice that the first tokens of a prompt, ``ids`` [n], were read into a place."""

    def note_token(self, place: int, token: int) -> None:
        """Take notice that a generated token was taken through the model."""

    def note_end(self, place: int) -> None:
        """Take notice that a place's sequence has ended; what is in it may be used again."""

    def forget(self, place: int) -> None:
        """Take notice that somebody else uses a place."""

    def close(self) -> None:
        """Give back files and threads."""


class NoPrefixes:
    """Every prompt is read from its beginning."""

    def __init__(self, forward: Sequences) -> None:
        self._forward = forward

    def choose_place(self, free: Sequence[int], prompt_ids: Sequence[int]) -> tuple[int, int]:
        """The first place, empty."""
        return self.choose_empty(free), 0

    def choose_empty(self, free: Sequence[int]) -> int:
        """The first place."""
        self._forward.reset(free[0])
        return free[0]

    def note_copy(self, source: int, target: int) -> None:
        """Do nothing."""

    def note_prompt(self, place: int, ids: I32) -> None:
        """Do nothing."""

    def note_token(self, place: int, token: int) -> None:
        """Do nothing."""

    def note_end(self, place: int) -> None:
        """Forget it: memory that its context does not use may be lent."""
        self._forward.reset(place)

    def forget(self, place: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
