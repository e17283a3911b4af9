"""Draft tokens that are verified together (``decode.speculation``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.engine.answer import Answer
from pi2.engine.opening import Parts, Touched
from pi2.engine.sequences import Sequences
from pi2.engine.statistics import SpeculationCounters

if TYPE_CHECKING:
    from pi2.engine.feed_forward import FeedForward

MOST_CANDIDATES = 8
"""Earlier places of the last tokens that are compared, the latest first."""
MOST_COMMON = 32
"""Tokens before such a place that are compared, at most."""


class Drafter(Protocol):
    """Drafts tokens. One caller at a time."""

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """Draft up to ``most`` tokens after ``ids`` [n] of a place; the last id is unread."""

    def forget(self, place: int) -> None:
        """Take notice that another sequence will have ``place``."""


class _Index:
    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], list[int]] = {}
        """Ends of the places of every few tokens that follow each other."""
        self.next = 0
        """First end that is not in it."""


class PromptLookup:
    """Drafts the continuation of an earlier occurrence of the last tokens."""

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
        self._indexes.pop(place, None)


def _count_common(ids: I64, end: int) -> int:
    """Tokens before ``end`` that are those at the end of ``ids``."""
    count = min(end, MOST_COMMON)
    differ = np.flatnonzero(ids[end - count : end] != ids[len(ids) - count :])
    return count - 1 - int(differ[-1]) if len(differ) else count


def _go_on(forward: Sequences, place: int, token: int, count: int) -> list[int]:
    """A token of a place, and so many of the likeliest ones after it."""
    found = [token]
    for _ in range(count):
        found.append(int(forward.step(found[-1:], [place])[0].argmax()))
    return found


class PlanDrafts:
    """Drafts the likeliest tokens of another model, which reads the same sequences."""

    def __init__(self, forward: Sequences, context: int) -> None:
        """``forward``: the draft model's; it has a place for each sequence with drafts.
        ``context``: tokens that a place has room for."""
        self._forward = forward
        self._context = context
        self._known: list[I64] = [np.empty(0, np.int64) for _ in forward.positions]
        """Tokens that it has in each place."""

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """See `pi2.engine.speculation.Drafter`; nothing for places or contexts that it has not."""
        if place >= len(self._known) or len(ids) - 1 + most > self._context:
            return []
        self._catch_up(place, ids)
        found = _go_on(self._forward, place, int(ids[-1]), most)
        self._known[place] = np.concatenate([ids, np.array(found[1:-1], np.int64)])
        return found[1:]

    def _catch_up(self, place: int, ids: I64) -> None:
        known = self._known[place]
        count = min(len(known), len(ids) - 1)
        differ = np.flatnonzero(known[:count] != ids[:count])
        common = int(differ[0]) if len(differ) else count
        if common < self._forward.earliest[place]:
            common = 0
        self._forward.go_on_from(place, common)
        if common < len(ids) - 1:
            missing = ids[common:-1].astype(np.int32)
            self._forward.prefill(missing, end=len(ids) - 1, sequence=place)

    def forget(self, place: int) -> None:
        if place < len(self._known):
            self._known[place] = np.empty(0, np.int64)
            self._forward.reset(place)


@dataclass(slots=True)
class _Trail:
    """The tokens of a sequence that the main model has read since an MTP head follows it."""

    first: int = 0
    """Position of the first of them."""
    tokens: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    inputs: list[F32] = field(default_factory=list)
    """What the main model's head read of the last of them [hidden]: the MTP head has not."""

    @property
    def done(self) -> int:
        """Tokens that the MTP head has read; each belongs to the position before its own."""
        return len(self.tokens) - len(self.inputs)

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` tokens."""
        del self.inputs[max(0, count - self.done) :]
        self.tokens = self.tokens[:count]


class MtpDrafts:
    """Drafts with an MTP head, which reads a token and what the main model's head read before it.

    The head's entry at a position is of that position's input and of the token that follows it.
    Later tokens of a draft take the head's own inputs; they are forgotten, and read again from the
    main model's."""

    def __init__(self, forward: Sequences, context: int) -> None:
        """``forward``: the MTP head's; ``context``: tokens that its places have room for."""
        self._forward = forward
        self._context = context
        self._trails = [_Trail() for _ in forward.positions]

    def watch(self, place: int, position: int, tokens: I32, inputs: F32) -> None:
        """See `Sequences.watch`.  Prompts are read at once: their inputs need no room."""
        if place >= len(self._trails):
            return
        trail = self._trails[place]
        if not trail.done <= position - trail.first <= len(trail.tokens):
            self.forget(place)  # it went on after a prefix that was read before
            trail = self._trails[place]
            trail.first = position
        trail.cut(position - trail.first)
        trail.tokens = np.concatenate([trail.tokens, tokens])
        trail.inputs += list(inputs.copy())
        if len(trail.tokens) > self._context:
            trail.inputs.clear()
        elif len(tokens) > 1:
            self._read(place, trail, trail.tokens[trail.done + 1 :])

    def _read(self, place: int, trail: _Trail, following: I32) -> None:
        """Read the first inputs, each with the token after it."""
        count = len(following)
        self._forward.go_on_from(place, trail.done)
        self._forward.given = np.stack(trail.inputs[:count])
        self._forward.prefill(following, end=trail.done + count, sequence=place)
        del trail.inputs[:count]

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """See `pi2.engine.speculation.Drafter`; nothing for places or contexts that it has not."""
        if place >= len(self._trails):
            return []
        forward, trail = self._forward, self._trails[place]
        count = len(ids) - 1 - trail.first
        if count + most > self._context or not trail.done < count <= len(trail.tokens):
            return []
        trail.cut(count)
        following = ids[trail.first + trail.done + 1 :].astype(np.int32)
        if len(following) > 1:
            self._read(place, trail, following[:-1])
        forward.go_on_from(place, trail.done)
        forward.given = np.stack(trail.inputs)
        trail.inputs.clear()
        found = [int(following[-1])]
        for _ in range(most):
            logits = forward.step(found[-1:], [place])[0]
            found.append(int(logits.argmax()))
            forward.given = forward.read_inputs(1).copy()
        return found[1:]

    def forget(self, place: int) -> None:
        if place < len(self._trails):
            self._trails[place] = _Trail()
            self._forward.reset(place)


class ResidentDrafts:
    """Drafts the likeliest tokens of the model itself, without reads."""

    def __init__(self, forward: Sequences, feed_forward: FeedForward) -> None:
        self._forward = forward
        self._feed_forward = feed_forward

    def propose(self, place: int, ids: I64, most: int) -> list[int]:
        """See `pi2.engine.speculation.Drafter`; the place is left as it was."""
        forward, position = self._forward, self._forward.positions[place]
        forward.mark(place)
        with self._feed_forward.leave_out_missing():
            found = _go_on(forward, place, int(ids[-1]), most)
        forward.take_back(place, position)
        return found[1:]

    def forget(self, place: int) -> None:
        """See `pi2.engine.speculation.Drafter`."""


WINDOW_STEPS = 16
"""Last steps that are compared."""
PLAIN_STEPS = 4
"""Steps without drafts before the first draft."""
TRIAL_STEPS = 8
"""Steps with drafts before the decision."""
REFRESH_STEPS = 24
"""After so many steps with drafts in a row, one goes without: contexts grow."""
FIRST_REST = 32
"""Steps that rest when it did not pay; twice as many each time that it does not again."""
LONGEST_REST = 512
GAIN = 0.05
"""Share of bytes and of seconds that drafts must save to be taken up again; they are given up if
they save nothing."""


@dataclass(slots=True)
class _Window:
    steps: deque[tuple[int, Touched, float]] = field(
        default_factory=lambda: deque(maxlen=WINDOW_STEPS)
    )
    """Tokens that were kept, bytes that were touched, seconds."""

    def find_weight(self) -> float:
        """Weight of the bytes for each token that was kept."""
        return sum(step[1].weight for step in self.steps) / max(1, self._count())

    def find_seconds(self) -> float:
        """Seconds for each; a few steps that the machine has disturbed do not count."""
        from statistics import median as find_median

        median = find_median(step[2] for step in self.steps)
        return median * len(self.steps) / max(1, self._count())

    def _count(self) -> int:
        return sum(step[0] for step in self.steps)


class Payback:
    """Decides for steps of as many sequences as there are."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether steps may have drafts."""
        self._plain = _Window()
        self._drafted = _Window()
        self._is_tried = False
        """Whether it is on to see whether it pays again."""
        self._in_row = 0
        """Steps with drafts since the last one without."""
        self._resting = 0
        """Steps that are still to rest."""
        self._rest = FIRST_REST

    def wants_draft(self) -> bool:
        """Whether the next step should have drafts, if there are any."""
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


class Speculation:
    """Proposes drafts, and learns from their acceptance.  Only the driver uses it."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        tokens: int,
        step_tokens: int,
        count_bytes: Callable[[], Touched],
        always: bool = False,
    ) -> None:
        """``tokens``: most of a draft; ``step_tokens``: of a step; ``count_bytes``: bytes touched
        so far; ``always``: draft even if it does not pay."""
        self._drafter = drafter
        self._tokens = tokens
        self._step_tokens = step_tokens
        self._count_bytes = count_bytes
        self._always = always
        self._paybacks: dict[int, Payback] = {}
        """By the number of sequences under way."""
        self._lengths: dict[int, int] = {}
        """Length of the next draft, by place: shorter after wrong drafts."""
        self._counters = SpeculationCounters(accepted_by_position=(0,) * tokens)
        self._bytes = Touched(0, 0)

    @property
    def counters(self) -> SpeculationCounters:
        return replace(self._counters)

    def propose(self, answers: Mapping[int, Answer]) -> dict[int, list[int]]:
        """Draft tokens by place, as far as it pays and a step has room; some have none."""
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
        """Take note of a step of ``sequences``: the tokens that each place has ``kept``, accepted
        drafts and the token drawn after them; ``taken_s``: seconds, drafting included."""
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


def make_speculation(parts: Parts) -> Speculation | None:
    """Make what drafts tokens; None if the plan wants none, or states cannot be copied."""
    plan, forward, draft = parts.resolved.plan, parts.forward, parts.draft
    settings = plan.decode.speculation
    if settings is None or parts.account.step_bytes is None:
        return None
    if parts.resolved.model.state_layers and forward.program is None:
        return None
    count = parts.count_touched
    drafter: Drafter
    if settings.drafts == "resident":
        drafter = ResidentDrafts(forward, parts.feed_forward)
    elif settings.drafts == "prompt":
        drafter = PromptLookup(settings.match)
    else:
        if draft is None or draft.account.step_bytes is None:
            return None
        drafter = _follow_plan(parts, draft)
        count = partial(_add_counts, count, draft.count_touched)
    return Speculation(
        drafter,
        tokens=settings.tokens,
        step_tokens=plan.decode.step_tokens,
        count_bytes=count,
        always=settings.when == "always",
    )


def _follow_plan(parts: Parts, draft: Parts) -> Drafter:
    context = draft.resolved.plan.kv.context
    if not draft.resolved.model.is_mtp:
        return PlanDrafts(draft.forward, context)
    drafter = MtpDrafts(draft.forward, context)
    if parts.forward.program is not None:
        parts.forward.watch = drafter.watch
    return drafter


def _add_counts(own: Callable[[], Touched], other: Callable[[], Touched]) -> Touched:
    return Touched(*map(sum, zip(own(), other(), strict=True)))
