"""Requests that share a model: they wait in line for a place, and join the sequences that are under
way at the next token (continuous batching).

Nothing runs by itself.  Whoever wants text drives: takes the lock and does rounds until there is
some for him, and others find theirs ready.  A round reads prompts, up to as many tokens as go
through a layer together, and then draws a token of every sequence whose prompt is read; a long
prompt does not keep the others waiting.  Clients take turns at the places that become free.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, RLock, get_ident

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.engine.answer import Answer, GenerationRequest, Piece, SequenceResult
from pi2.engine.prefixes import NoPrefixes, Prefixes
from pi2.engine.sequences import Sequences
from pi2.engine.speculation import Speculation
from pi2.engine.text import TokenDecoder

_PATIENCE_S = 1.0
"""Whoever waits for a place looks again after this time."""


class Ticket:
    """A request in line, or under way, or ended."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        client: str = "",
        progress: Callable[[float], None] = lambda share: None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """``client``: whose it is; ``progress`` is told the share of the prompt that is done, and
        ``notify`` is called when there is something to take, by whoever drives."""
        self.request = request
        self.client = client
        self.progress = progress
        self.notify = notify
        self.pieces: deque[Piece] = deque()
        """What was generated and nobody has taken yet."""
        self.answer: Answer | None = None
        """What is generated, from the moment that it has a place."""
        self.result: SequenceResult | None = None
        """The result, when it has ended by itself."""
        self.error: Exception | None = None
        """Why it has failed, if it has."""
        self.cancelled = False
        """Whether nobody wants it any more: its place is given to another one before the next
        token.  Any thread may set it."""
        self.ended = False
        """Whether nothing will come any more."""
        self.reused_tokens = 0
        """Tokens of the prompt whose keys and values were there already."""

    def cancel(self) -> None:
        """Say that nobody wants it any more."""
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class Rounds:
    """What was done for all requests so far."""

    steps: int = 0
    """Steps, each of the sequences that were under way."""
    stepped_sequences: int = 0
    """Sequences of each step, summed up."""
    stepped_tokens: int = 0
    """Tokens that they made."""
    steps_s: float = 0.0
    """Seconds in them."""
    prompt_tokens: int = 0
    """Tokens of prompts that were read."""
    prefill_s: float = 0.0
    """Seconds in them."""

    def __sub__(self, other: Rounds) -> Rounds:
        return Rounds(
            self.steps - other.steps,
            self.stepped_sequences - other.stepped_sequences,
            self.stepped_tokens - other.stepped_tokens,
            self.steps_s - other.steps_s,
            self.prompt_tokens - other.prompt_tokens,
            self.prefill_s - other.prefill_s,
        )


class Line:
    """Requests that wait, by client; clients take turns.  Whoever drives uses it alone."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[Ticket]:
        for tickets in self._clients.values():
            yield from tickets

    def push(self, ticket: Ticket) -> None:
        """Put a request at the end of its client's."""
        self._clients.setdefault(ticket.client, deque()).append(ticket)

    def pop(self) -> Ticket:
        """Take the next one: the first of the client whose turn it is."""
        client, tickets = self._clients.popitem(last=False)
        ticket = tickets.popleft()
        if tickets:
            self._clients[client] = tickets
        return ticket

    def drop_cancelled(self) -> list[Ticket]:
        """Take out those that nobody wants any more."""
        dropped = [ticket for ticket in self if ticket.cancelled]
        for ticket in dropped:
            own = self._clients[ticket.client]
            own.remove(ticket)
            if not own:
                del self._clients[ticket.client]
        return dropped


class Scheduler:
    """Gives the places of a model's sequences to requests.  Any thread may call it."""

    def __init__(
        self,
        forward: Sequences,
        *,
        context: int,
        piece_tokens: int,
        make_decoder: Callable[[GenerationRequest], TokenDecoder],
        prefixes: Prefixes | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """``context``: tokens that a sequence has room for; ``piece_tokens``: tokens of prompts
        that go through a layer together; ``prefixes``: what knows keys and values of earlier
        prompts; ``speculation``: what guesses tokens, if anything."""
        self._forward = forward
        self._context = context
        self._piece_tokens = piece_tokens
        self._make_decoder = make_decoder
        self.prefixes: Prefixes = prefixes or NoPrefixes(forward)
        self.speculation = speculation
        self._lock = RLock()
        self._given_back = Condition(self._lock)
        self._borrowers: dict[int, int] = {}
        """Threads that use the model without a request, by the places that they keep."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to do for somebody who drives all the time."""
        self._inbox: deque[Ticket] = deque()
        """New requests: whoever brings one need not wait for the round that is under way."""
        self._line = Line()
        self._free = list(range(len(forward.positions)))
        self._reading: dict[int, Ticket] = {}
        """Requests whose prompts are read, by their places, in the order in which they came."""
        self._running: dict[int, Ticket] = {}
        """Requests under way, by their places."""
        self._closed = False
        self.rounds = Rounds()

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self._inbox) + len(self._line)

    @property
    def running(self) -> int:
        """Requests that have a place."""
        return len(self._reading) + len(self._running)

    @property
    def places(self) -> int:
        """Sequences that there may be at the same time."""
        return len(self._forward.positions)

    def measure_context_use(self) -> float:
        """Share of the room for keys and values that sequences under way have filled."""
        places = [*self._reading, *self._running]
        used = sum(self._forward.positions[place] for place in places)
        return used / (self._context * self.places)

    def submit(self, ticket: Ticket) -> None:
        """Put a request into the line; UserError P615 if the model is closed."""
        self.check_open()
        self._inbox.append(ticket)
        self.wake()

    def check_open(self) -> None:
        """UserError P615 if the model is closed."""
        if self._closed:
            raise _describe_closed()

    def wait(self, tickets: Sequence[Ticket]) -> None:
        """Drive until there is something to take of one of ``tickets``, or one of them has ended.

        UserError P613 if there never will be, because the calling thread itself keeps all places.
        """

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
            self._admit()
            worked = bool(self._reading or self._running)
            if self._reading:
                self._read_prompts()
            if self._running:
                self._step()
            return worked

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Let nobody drive meanwhile; UserError P615 if the model is closed."""
        with self._lock:
            self.check_open()
            yield

    @contextmanager
    def borrow_place(self) -> Iterator[int]:
        """A place for somebody who uses the model without a request, until he gives it back.

        Requests under way are driven until one ends, if need be.  UserError P613 if the calling
        thread keeps all places.
        """
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
        """End everything: whoever waits is told (P615)."""
        self._closed = True
        with self._lock:
            for ticket in [*self._inbox, *self._line, *self._reading.values()]:
                self._fail(ticket, _describe_closed())
            for ticket in self._running.values():
                self._fail(ticket, _describe_closed())
            self._inbox.clear()
            self._line = Line()
            self._reading.clear()
            self._running.clear()
            self._given_back.notify_all()
            self.prefixes.close()

    # Whoever drives:

    def _admit(self) -> None:
        """Free the places of those that nobody wants; give free ones to those that wait."""
        while self._inbox:
            self._line.push(self._inbox.popleft())
        for ticket in self._line.drop_cancelled():
            self._end(ticket)
        for group in (self._reading, self._running):
            for place in [place for place, ticket in group.items() if ticket.cancelled]:
                ticket = group.pop(place)
                self._end(ticket)
                self._give_back(place, ticket)
        while len(self._line) and self._free:
            ticket = self._line.pop()
            try:
                place, reused = self.prefixes.choose_place(self._free, ticket.request.prompt_ids)
            except Exception as error:
                self._fail(ticket, error)
                continue
            self._free.remove(place)
            ticket.reused_tokens = reused
            ticket.answer = Answer(
                ticket.request, self._make_decoder(ticket.request), self._context
            )
            self._reading[place] = ticket

    def _read_prompts(self) -> None:
        """Read pieces of prompts, together as many tokens as go through a layer at once."""
        room = self._piece_tokens
        while self._reading and room > 0:
            place, ticket = next(iter(self._reading.items()))
            answer = ticket.answer
            assert answer is not None
            ids, done = answer.prompt_ids, self._forward.positions[place]
            # Pieces begin where they begin in a prompt that is read without reuse.
            end = min(len(ids), done + self._piece_tokens - done % self._piece_tokens)
            start = time.perf_counter()
            report = partial(_report, ticket.progress, done, end, len(ids))
            try:
                logits = self._forward.prefill(
                    ids[done:end], progress=report, end=len(ids), sequence=place
                )
                self.prefixes.note_prompt(place, ids[:end])
                if end == len(ids):
                    self._take(ticket, logits[0])
            except Exception as error:
                self._fail(ticket, error)
            taken_s = time.perf_counter() - start
            self.rounds = replace(
                self.rounds,
                prompt_tokens=self.rounds.prompt_tokens + end - done,
                prefill_s=self.rounds.prefill_s + taken_s,
            )
            room -= end - done
            if end == len(ids) or ticket.ended:
                del self._reading[place]
                self._running[place] = ticket
                self._free_ended()

    def _step(self) -> None:
        """Draw tokens of every sequence whose prompt is read: one, and those that were guessed."""
        running = dict(self._running)
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
        self.rounds = replace(
            self.rounds,
            steps=self.rounds.steps + 1,
            stepped_sequences=self.rounds.stepped_sequences + len(running),
            stepped_tokens=self.rounds.stepped_tokens + sum(kept.values()),
            steps_s=self.rounds.steps_s + taken_s,
        )
        self._free_ended()

    def _guess(self, running: Mapping[int, Ticket]) -> dict[int, list[int]]:
        """Tokens that may come next, of those places that have a guess."""
        if self.speculation is None:
            return {}
        answers = {place: _get_answer(ticket) for place, ticket in running.items()}
        guesses = self.speculation.propose(answers)
        for place in guesses:
            self._forward.mark(place)
        return guesses

    def _draw(self, place: int, ticket: Ticket, tokens: Sequence[int], logits: F32) -> int:
        """Draw from ``logits`` [n, vocab], those after each of ``tokens``, as long as what is drawn
        is the next one of them; return how many were drawn."""
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
        """Forget the last ``count`` tokens that were guessed, and not drawn."""
        try:
            self._forward.take_back(place, self._forward.positions[place] - count)
        except Exception as error:
            self._fail(ticket, error)

    def _take(self, ticket: Ticket, logits: F32) -> None:
        """Draw a token and put what it makes where the one who waits finds it."""
        answer = _get_answer(ticket)
        piece = answer.take(logits)
        if answer.reason is not None:
            ticket.result = answer.describe()
        if piece.text or piece.scores:
            ticket.pieces.append(piece)
        if ticket.result is not None:
            ticket.ended = True
        if ticket.ended or piece.text or piece.scores:
            ticket.notify()

    def _free_ended(self) -> None:
        for place in [place for place, ticket in self._running.items() if ticket.ended]:
            self._give_back(place, self._running.pop(place))

    def _give_back(self, place: int, ticket: Ticket) -> None:
        """Let others have the place of what has ended."""
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


def _report(
    progress: Callable[[float], None], done: int, end: int, total: int, share: float
) -> None:
    """Report the share of a prompt that is done, with ``share`` of the tokens up to ``end``."""
    progress((done + (end - done) * share) / total)


def _describe_closed() -> UserError:
    return UserError.of(
        "P615",
        "the model is closed",
        help="generate before close(), or inside the with statement that loads the model",
    )
