"""Tokens that are guessed and verified together (``decode.speculation``).

A step takes the last token of a sequence and the guesses that follow it through the model at once.
Its logits are those that the tokens have one by one, so the answer draws from them as ever, one
after the other with the same random numbers: the first token that differs from its guess ends the
step's use, and what was guessed after it is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pi2.engine.answer import Answer
from pi2.engine.drafting import Drafter
from pi2.engine.payback import Payback, Touched
from pi2.engine.speculation_counters import SpeculationCounters


class Speculation:
    """Says what to guess, and learns what came of it.  Whoever drives uses it alone."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        tokens: int,
        step_tokens: int,
        count_bytes: Callable[[], Touched],
        always: bool = False,
    ) -> None:
        """``tokens``: most of a guess; ``step_tokens``: most of a step; ``count_bytes`` gives the
        bytes that all steps so far have touched, in memory and on flash; ``always``: whether or
        not it pays."""
        self._drafter = drafter
        self._tokens = tokens
        self._step_tokens = step_tokens
        self._count_bytes = count_bytes
        self._always = always
        self._paybacks: dict[int, Payback] = {}
        """By the number of sequences under way."""
        self._lengths: dict[int, int] = {}
        """Tokens to guess next, by place: fewer where guesses were wrong."""
        self._counters = SpeculationCounters(accepted_by_position=(0,) * tokens)
        self._bytes = Touched(0, 0)

    @property
    def counters(self) -> SpeculationCounters:
        """What was done so far."""
        return replace(self._counters)

    def propose(self, answers: Mapping[int, Answer]) -> dict[int, list[int]]:
        """Guess what comes next in each place, as far as it pays and a step has room; places
        without a guess are left out."""
        self._bytes = self._count_bytes()
        payback = self._paybacks.setdefault(len(answers), Payback())
        if not self._always and not payback.wants_draft():
            return {}
        room, found = self._step_tokens - len(answers), {}
        for place, answer in answers.items():
            most = min(room, answer.room - 1, self._lengths.get(place, self._tokens))
            if most < 1:
                continue
            guess = self._drafter.propose(place, answer.ids, most)[:most]
            if guess:
                found[place] = guess
                room -= len(guess)
        return found

    def note_step(
        self,
        sequences: int,
        guesses: Mapping[int, list[int]],
        kept: Mapping[int, int],
        taken_s: float,
    ) -> None:
        """Take note of a step of ``sequences``: the tokens that each place has ``kept``, guesses
        that were drawn and the one drawn after them; ``taken_s``: seconds, guessing included."""
        now, before, tokens = self._count_bytes(), self._bytes, sum(kept.values())
        touched = Touched(now.memory - before.memory, now.flash - before.flash)
        payback = self._paybacks.setdefault(sequences, Payback())
        payback.note(drafted=bool(guesses), tokens=tokens, touched=touched, seconds=taken_s)
        counters = self._counters
        if not guesses:
            counters.plain_tokens += tokens
            counters.plain_bytes += touched.total
            counters.plain_flash_bytes += touched.flash
            return
        counters.drafted_steps += 1
        counters.drafted_tokens += tokens
        counters.drafted_bytes += touched.total
        counters.drafted_flash_bytes += touched.flash
        for place, guess in guesses.items():
            self._note_guess(place, len(guess), max(0, kept.get(place, 0) - 1))

    def _note_guess(self, place: int, count: int, accepted: int) -> None:
        counters, length = self._counters, self._lengths.get(place, self._tokens)
        counters.drafts += 1
        counters.draft_tokens += count
        counters.accepted_tokens += accepted
        counters.accepted_by_position = tuple(
            before + (number < accepted)
            for number, before in enumerate(counters.accepted_by_position)
        )
        length = length + 2 if accepted == count else accepted + 1
        self._lengths[place] = min(self._tokens, length)

    def forget(self, place: int) -> None:
        """Take notice that a place's sequence has ended."""
        self._lengths.pop(place, None)
        self._drafter.forget(place)
