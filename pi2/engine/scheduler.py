"""Requests that share a model by continuous batching. The scheduler has no thread: a caller that
needs output takes the lock and runs rounds until its output is ready. A round reads prompts, then
draws a token of every read sequence; clients take turns at free places."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import add
from threading import Condition, RLock, get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.engine.answer import Answer, GenerationRequest, Line, Ticket, TokenDecoder, score_token
from pi2.engine.prefixes import Prefixes
from pi2.engine.sequences import KeptContext, Sequences
from pi2.engine.speculation import Speculation
from pi2.engine.statistics import Phase, Rounds

if TYPE_CHECKING:
    from pi2.backends.faults.shortage import MemoryWatch

_PATIENCE_S = 1.0
"""A request that waits for a place looks again after this time."""


class _Unwanted(Exception):
    """The prompt that is being read was cancelled."""


class Scheduler:
    """Gives the places of a model's sequences to requests.  Any thread may call it."""

    def __init__(
        self,
        forward: Sequences,
        *,
        context: int,
        piece_tokens: int,
        make_decoder: Callable[[GenerationRequest], TokenDecoder],
        speculation: Speculation | None = None,
        count_reads: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
    ) -> None:
        """``context``: tokens of a sequence; ``piece_tokens``: prompt tokens of a round;
        ``speculation``: drafts, if any; ``count_reads``: bytes that were read so far, and seconds
        that computing has waited for them."""
        self._forward = forward
        self._context = context
        self._piece_tokens = piece_tokens
        self._make_decoder = make_decoder
        self.prefixes = Prefixes(forward)
        self.speculation = speculation
        self._count_reads = count_reads
        self._lock = RLock()
        self._given_back = Condition(self._lock)
        self._borrowers: dict[int, int] = {}
        """Threads that use the model without a request, by the places that they keep."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to do for a permanent driver."""
        self.has_driver = False
        self.watch: MemoryWatch | None = None
        """Ends rounds that make no progress for lack of memory."""
        self._inbox: deque[Sequence[Ticket]] = deque()
        """New requests: submitting some does not wait for the round under way."""
        self._line = Line()
        self._free = list(range(len(forward.positions)))
        self._reading: dict[int, Ticket] = {}
        """Requests whose prompts are read, by their places, in the order in which they came."""
        self._running: dict[int, Ticket] = {}
        """Requests under way, by their places."""
        self._following: dict[int, list[tuple[int, Ticket]]] = {}
        """Requests, with their places, whose prompts are read for another one, by its place."""
        self._closed = False
        self._calls: deque[tuple[Future[None], Callable[[], None]]] = deque()
        """Work between two rounds."""
        self._phases: dict[int, list[Any]] = {}
        """Values of `Phase`, by the number of sequences."""
        self._prompt_tokens, self._prefill_s = 0, 0.0

    @property
    def rounds(self) -> Rounds:
        phases = {sequences: Phase(*own) for sequences, own in list(self._phases.items())}
        return Rounds(
            phases=MappingProxyType(phases),
            prompt_tokens=self._prompt_tokens,
            prefill_s=self._prefill_s,
        )

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return sum(map(len, list(self._inbox))) + len(self._line)

    @property
    def running(self) -> int:
        following = sum(map(len, list(self._following.values())))
        return len(self._reading) + len(self._running) + following

    @property
    def places(self) -> int:
        """Sequences that there may be at the same time."""
        return len(self._forward.positions)

    def measure_context_use(self) -> float:
        """Share of the KV cache that sequences under way have filled."""
        places = [*self._reading, *self._running]
        used = sum(self._forward.positions[place] for place in places)
        return used / (self._context * self.places)

    def call_between(self, work: Callable[[], None]) -> None:
        """Do ``work`` between two rounds, in the thread of the permanent driver if there is one;
        raises its error.  UserError P615 if the model is closed."""
        self.check_open()
        done: Future[None] = Future()
        self._calls.append((done, work))
        if self.has_driver:
            self.wake()
        else:
            with self._lock:
                self._make_calls()
        done.result()

    def _make_calls(self) -> None:
        while self._calls:
            done, work = self._calls.popleft()
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    @property
    def can_move(self) -> bool:
        """Whether `take_contexts` works."""
        return self._forward.program is not None and not self._borrowers

    def take_contexts(self) -> dict[int, KeptContext]:
        """Copies of the contexts of all places; only in `call_between`."""
        places = range(self.places)
        return {place: self._forward.take_context(place) for place in places}

    def take_forward(self, other: Scheduler) -> None:
        """Go on with the model of ``other``, whose sequences are empty."""
        other._forward.steps = self._forward.steps
        other._forward.attended_tokens = self._forward.attended_tokens
        self._forward, self._count_reads = other._forward, other._count_reads
        self.speculation, self.watch = other.speculation, other.watch
        self.prefixes.follow(other._forward)

    def put_contexts(self, kept: Mapping[int, KeptContext]) -> None:
        """Let all places go on where `take_contexts` was called."""
        for place, context in kept.items():
            self._forward.put_context(place, context)

    def submit(self, *tickets: Ticket) -> None:
        """Put requests into the line; if several have the same prompt, and a place, it is read
        once. UserError P615 if the model is closed."""
        self.check_open()
        self._inbox.append(tickets)
        self.wake()

    def check_open(self) -> None:
        """UserError P615 if the model is closed."""
        if self._closed:
            raise _describe_closed()

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Drive until one of ``tickets`` has output or ended; P613 if this thread has all
        places."""

        def is_there() -> bool:
            return any(ticket.pieces or ticket.ended for ticket in tickets)

        while not is_there():
            with self._lock:
                if not is_there() and not self.drive() and not is_there():
                    self._await_place()

    def drive(self) -> bool:
        """Do a round; whether there was anything to do."""
        with self._lock:
            if self._closed:
                return False
            self._make_calls()
            self._admit()
            worked = bool(self._reading or self._running)
            with nullcontext() if self.watch is None else self.watch.work():
                self._read_prompts()
                if self._running:
                    self._step()
            return worked

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Keep others from driving meanwhile; UserError P615 if the model is closed."""
        with self._lock:
            self.check_open()
            yield

    @contextmanager
    def borrow_place(self) -> Iterator[int]:
        """A place without a request for a while, after driving others if needed; UserError P613."""
        with self._lock:
            self.check_open()
            while not self._free:
                if not self.drive():
                    self._await_place()
            place = self._free.pop(0)
            self._borrowers[place] = get_ident()
            self._forward.reset(place)
            self.prefixes.forget(place)
        try:
            yield place
        finally:
            with self._lock:
                del self._borrowers[place]
                self._free.insert(0, place)
                self._given_back.notify_all()
            self.wake()

    def _await_place(self) -> None:
        """Wait until another thread gives a place back."""
        self.check_open()
        if get_ident() in self._borrowers.values():
            raise UserError.of(
                "P613",
                "the model is busy: logits of another text are being read piece by piece",
                help="read all of them first, or close their iterator",
            )
        self._given_back.wait(_PATIENCE_S)

    def close(self) -> None:
        """End everything: waiting callers get P615."""
        self._closed = True
        with self._lock:
            new = [ticket for tickets in self._inbox for ticket in tickets]
            following = [ticket for group in self._following.values() for _, ticket in group]
            under_way = [*self._reading.values(), *following, *self._running.values()]
            for ticket in [*new, *self._line, *under_way]:
                self._fail(ticket, _describe_closed())
            self._inbox.clear()
            self._line = Line()
            self._reading.clear()
            self._following.clear()
            self._running.clear()
            self._given_back.notify_all()
            while self._calls:
                self._calls.popleft()[0].set_exception(_describe_closed())

    # Whoever drives:

    def _admit(self) -> None:
        """Free the places of cancelled requests; give free ones to waiting requests."""
        while self._inbox:
            for ticket in self._inbox.popleft():
                self._line.push(ticket)
        for ticket in self._line.drop_cancelled():
            self._end(ticket)
        for leader, followers in self._following.items():
            for place, ticket in [item for item in followers if item[1].cancelled]:
                self._following[leader].remove((place, ticket))
                self._end(ticket)
                self._give_back(place, ticket)
        for group in (self._reading, self._running):
            for place in [place for place, ticket in group.items() if ticket.cancelled]:
                ticket = group.pop(place)
                self._let_next_read(place)
                self._end(ticket)
                self._give_back(place, ticket)
        while len(self._line) and self._free:
            ticket = self._line.pop()
            try:
                self._give_place(ticket)
            except Exception as error:
                self._fail(ticket, error)

    def _give_place(self, ticket: Ticket) -> None:
        """Choose a free place for a request, and whether its prompt is read for it."""
        ids, leader = ticket.request.prompt_ids, self._find_leader(ticket)
        if leader is None:
            if ticket.request.scores_prompt:  # all of it has to be read
                place = self.prefixes.choose_empty(self._free)
            else:
                place, ticket.reused_tokens = self.prefixes.choose_place(self._free, ids)
            self._reading[place] = ticket
        else:
            place = self.prefixes.choose_empty(self._free)
            ticket.reused_tokens = self._reading[leader].reused_tokens
            self._following.setdefault(leader, []).append((place, ticket))
        self._free.remove(place)
        ticket.answer = Answer(ticket.request, self._make_decoder(ticket.request), self._context)

    def _find_leader(self, ticket: Ticket) -> int | None:
        """The place in which the prompt of a request is being read for another one."""
        if self._forward.program is None:
            return None
        wanted = _describe_prompt(ticket)
        reading = self._reading.items()
        return next((place for place, own in reading if _describe_prompt(own) == wanted), None)

    def _let_next_read(self, place: int) -> None:
        """Let the first of those read the prompt for whom ``place`` will not read it."""
        followers = self._following.pop(place, [])
        if followers:
            own, ticket = followers.pop(0)
            ticket.reused_tokens = 0
            self._reading[own] = ticket
            self._following[own] = followers

    def _share_prompt(self, place: int, logits: F32) -> None:
        """Copy the prompt read in ``place`` to the requests that share it; ``logits`` [vocab] are
        those after the prompt."""
        scores = self._reading[place].prompt_scores
        for own, ticket in self._following.pop(place, []):
            ticket.prompt_scores = scores
            try:
                self._forward.copy(place, own)
                self.prefixes.note_copy(place, own)
                ticket.shared_tokens = len(ticket.request.prompt_ids)
                self._take(ticket, logits)
            except Exception as error:
                self._fail(ticket, error)
            self._running[own] = ticket

    def _read_prompts(self) -> None:
        room = self._piece_tokens
        while self._reading and room > 0:
            place, ticket = next(iter(self._reading.items()))
            ids, done = _get_answer(ticket).prompt_ids, self._forward.positions[place]
            # Pieces begin where they begin in a prompt that is read without reuse.
            end = min(len(ids), done + self._piece_tokens - done % self._piece_tokens)
            start = time.perf_counter()
            report = partial(self._report, place, ticket, done, end)
            more: dict[str, Any] = {}
            if ticket.request.scores_prompt:
                more["take"] = partial(_score_prompt, ticket)
            try:
                logits = self._forward.prefill(
                    ids[done:end], progress=report, end=len(ids), sequence=place, **more
                )
                self.prefixes.note_prompt(place, ids[:end], len(ids))
                if end == len(ids):
                    self._take(ticket, logits[0])
                    self._share_prompt(place, logits[0])
            except _Unwanted:
                self._forward.reset(place)
                self.prefixes.forget(place)
                self._end(ticket)
            except Exception as error:
                self._fail(ticket, error)
                self._let_next_read(place)
            self._prefill_s += time.perf_counter() - start
            self._prompt_tokens += end - done
            room -= end - done
            if end == len(ids) or ticket.ended:
                del self._reading[place]
                self._running[place] = ticket
                self._free_ended()

    def _report(self, place: int, ticket: Ticket, done: int, end: int, share: float) -> None:
        """Report the share of a prompt that is done, with ``share`` of the tokens up to ``end``;
        stop reading cancelled prompts."""
        if ticket.cancelled and not self._following.get(place):
            raise _Unwanted
        self._check_memory()
        ticket.progress((done + (end - done) * share) / len(ticket.request.prompt_ids))

    def _step(self) -> None:
        """Draw tokens of every sequence whose prompt is read: one, and accepted draft tokens."""
        running = dict(self._running)
        read_bytes, waited_s = self._count_reads()
        start = time.perf_counter()
        try:
            guesses = self._guess(running)
            fed = {
                place: [_get_answer(ticket).last_token, *guesses.get(place, ())]
                for place, ticket in running.items()
            }
            logits = self._forward.step(
                [token for tokens in fed.values() for token in tokens],
                [place for place, tokens in fed.items() for _ in tokens],
            )
            self._check_memory()
        except Exception as error:
            for ticket in running.values():
                self._fail(ticket, error)
            self._free_ended()
            return
        kept, first = {}, 0
        for place, tokens in fed.items():
            rows = logits[first : first + len(tokens)]
            kept[place] = self._draw(place, running[place], tokens, rows)
            first += len(tokens)
        # The logits are not needed any more.
        for place, tokens in fed.items():
            if kept[place] < len(tokens):
                self._take_back(place, running[place], len(tokens) - kept[place])
        taken_s = time.perf_counter() - start
        if self.speculation is not None:
            self.speculation.note_step(len(running), guesses, kept, taken_s)
        after_bytes, after_s = self._count_reads()
        step = (1, sum(kept.values()), taken_s, after_bytes - read_bytes, after_s - waited_s)
        own = self._phases.setdefault(len(running), [0, 0, 0.0, 0, 0.0])
        own[:] = map(add, own, step)
        self._free_ended()

    def _check_memory(self) -> None:
        """UserError P696 if memory was too short for progress."""
        if self.watch is not None:
            self.watch.check()

    def _guess(self, running: Mapping[int, Ticket]) -> dict[int, list[int]]:
        """Draft tokens, for places that have some."""
        if self.speculation is None:
            return {}
        answers = {place: _get_answer(ticket) for place, ticket in running.items()}
        guesses = self.speculation.propose(answers)
        for place in guesses:
            self._forward.mark(place)
        return guesses

    def _draw(self, place: int, ticket: Ticket, tokens: Sequence[int], logits: F32) -> int:
        """Draw from ``logits`` [n, vocab], one row after each of ``tokens``, as long as each drawn
        token is the next draft; return how many were drawn."""
        following = [*tokens[1:], None]
        for number, (row, guess) in enumerate(zip(logits, following, strict=True), 1):
            self.prefixes.note_token(place, tokens[number - 1])
            try:
                self._take(ticket, row)
            except Exception as error:
                self._fail(ticket, error)
            if ticket.ended or _get_answer(ticket).last_token != guess:
                return number
        return len(tokens)

    def _take_back(self, place: int, ticket: Ticket, count: int) -> None:
        """Forget the last ``count`` tokens that were predicted, and not drawn."""
        try:
            self._forward.take_back(place, self._forward.positions[place] - count)
        except Exception as error:
            self._fail(ticket, error)

    def _take(self, ticket: Ticket, logits: F32) -> None:
        answer = _get_answer(ticket)
        piece = answer.take(logits)
        if piece.text or piece.scores:
            ticket.pieces.append(piece)
        if answer.reason is not None:
            ticket.result = answer.describe()
            ticket.ended = True
        if ticket.ended or piece.text or piece.scores:
            ticket.notify()

    def _free_ended(self) -> None:
        for place in [place for place, ticket in self._running.items() if ticket.ended]:
            self._give_back(place, self._running.pop(place))

    def _give_back(self, place: int, ticket: Ticket) -> None:
        if self.speculation is not None:
            self.speculation.forget(place)
        if ticket.error is None:
            self.prefixes.note_end(place)
        else:
            self._forward.reset(place)
            self.prefixes.forget(place)
        self._free.append(place)

    def _end(self, ticket: Ticket) -> None:
        ticket.ended = True
        ticket.notify()

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.error = error
        self._end(ticket)


def _get_answer(ticket: Ticket) -> Answer:
    assert ticket.answer is not None, "it has a place"
    return ticket.answer


def _describe_prompt(ticket: Ticket) -> tuple[list[int], int | None]:
    """The tokens of a prompt, and if it is scored, the number of alternatives to each."""
    request = ticket.request
    return list(request.prompt_ids), (request.alternatives or 0) if request.scores_prompt else None


def _score_prompt(ticket: Ticket, logits: F32) -> None:
    """Take notice of ``logits`` [n, vocab], those after the next tokens of a prompt."""
    ids, scores = ticket.request.prompt_ids, ticket.prompt_scores
    following = ids[len(scores) + 1 : len(scores) + 1 + len(logits)]
    count = ticket.request.alternatives or 0
    for row, token in zip(logits, following, strict=False):
        scores.append(score_token(row, token, count))


def _describe_closed() -> UserError:
    return UserError.of(
        "P615",
        "the model is closed",
        help="generate before close(), or inside the with statement that loads the model",
    )
