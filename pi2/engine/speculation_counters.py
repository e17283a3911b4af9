"""What speculation has done, as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest


@dataclass(slots=True, kw_only=True)
class SpeculationCounters:
    """What speculation has done since loading."""

    drafts: int = 0
    """Guesses of one token or more."""
    draft_tokens: int = 0
    """Tokens that were guessed."""
    accepted_tokens: int = 0
    """Those of them that were drawn."""
    accepted_by_position: tuple[int, ...] = ()
    """Those of them that were the first of a guess, the second, and so on."""
    drafted_steps: int = 0
    """Steps with guesses."""
    drafted_tokens: int = 0
    """Tokens that these have made, beside guesses that were drawn also those drawn after them."""
    drafted_bytes: int = 0
    """Bytes that these have touched in memory and on flash, guessing included."""
    drafted_flash_bytes: int = 0
    """Those of them on flash."""
    plain_tokens: int = 0
    """Tokens that steps without guesses have made."""
    plain_bytes: int = 0
    """Bytes that these have touched in memory and on flash."""
    plain_flash_bytes: int = 0
    """Those of them on flash."""

    def __add__(self, other: SpeculationCounters) -> SpeculationCounters:
        return self._combine(other, 1)

    def __sub__(self, other: SpeculationCounters) -> SpeculationCounters:
        return self._combine(other, -1)

    def _combine(self, other: SpeculationCounters, sign: int) -> SpeculationCounters:
        names = [name for name in self.__dataclass_fields__ if name != "accepted_by_position"]
        pairs = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return SpeculationCounters(
            accepted_by_position=tuple(mine + sign * theirs for mine, theirs in pairs),
            **{name: getattr(self, name) + sign * getattr(other, name) for name in names},
        )
