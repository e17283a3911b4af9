"""Text out of a prompt: an iterator of pieces with a result at its end."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Generic, Literal, Self, TypeVar

import numpy as np

from pi2.arrays import F32, I32
from pi2.diagnostics import UserError
from pi2.engine.answer import GenerationRequest, Piece, SequenceResult, Ticket, tell_nobody
from pi2.engine.opening import Parts
from pi2.engine.scheduler import Scheduler
from pi2.engine.statistics import Rounds, RunStatistics, divide


def read_prompt(file: Path | None) -> str:
    """The prompt in a file, or on standard input; UserError P603 or P607."""
    try:
        if file is not None:
            data = file.read_bytes()
        elif sys.stdin.isatty() or not (data := sys.stdin.buffer.read()):
            raise UserError.of(
                "P603", "there is no prompt", help="give --prompt TEXT, -f FILE, or standard input"
            )
        return data.decode("utf-8")
    except OSError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of("P607", f"cannot read the prompt {place}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = "standard input" if file is None else str(file)
        raise UserError.of(
            "P607",
            f"the prompt is not UTF-8: byte {error.start} of {place}",
            help="save the text as UTF-8",
        ) from None


_PATIENCE_S = 60.0
"""The thread looks by itself after this time whether there is something to do."""


class Driver:
    """Does rounds as long as there is something to do."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wake = Event()
        self._ending = False
        self._thread: Thread | None = None
        scheduler.wake = self._wake.set
        scheduler.has_driver = True

    def start(self) -> None:
        """Do it in a thread of its own."""
        self._thread = Thread(target=self.run, name="pi2-driver", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Do it in the calling thread until `end` is called."""
        while not self._ending:
            self._wake.clear()
            while not self._ending and self._scheduler.drive():
                pass
            if not self._ending:
                self._wake.wait(_PATIENCE_S)

    def submit(self, *tickets: Ticket) -> None:
        """Put requests into the line; UserError P615 if the model is closed."""
        self._scheduler.submit(*tickets)

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()
        self._wake.set()

    def end(self) -> None:
        """End the thread after the round that is under way."""
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()


async def stream_pieces(
    driver: Driver, ticket: Ticket, *, submitted: bool = False
) -> AsyncGenerator[Piece, None]:
    """Submit ``ticket`` unless ``submitted``, and yield its pieces; ending early gives it up."""
    import asyncio  # with TLS it takes 4 MiB, which runs that only generate do without

    loop = asyncio.get_running_loop()
    ready = asyncio.Event()

    def notify() -> None:
        try:
            loop.call_soon_threadsafe(ready.set)
        except RuntimeError:  # the loop has ended: nobody waits any more
            ticket.cancel()

    ticket.notify = notify
    if submitted:
        # Something may have come before there was anybody to tell.
        ready.set()
    else:
        driver.submit(ticket)
    try:
        while True:
            await ready.wait()
            ready.clear()
            ended = ticket.ended
            while ticket.pieces:
                yield ticket.pieces.popleft()
            if ended:
                break
    finally:
        # What was called knows the ticket: both would stay until somebody looks for garbage.
        ticket.notify = tell_nobody
        if not ticket.ended:
            driver.cancel(ticket)
    if ticket.error is not None:
        raise ticket.error


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """All sequences, finished."""

    sequences: tuple[SequenceResult, ...]
    """In the order of their prompts.  The times of each include work for others meanwhile."""
    rounds: Rounds
    """Prompts that were read and steps that were done, by the number of sequences in each."""
    statistics: RunStatistics
    """Counters of all of them."""

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens per second."""
        return divide(self.rounds.prompt_tokens, self.rounds.prefill_s)

    @property
    def decode_tokens_s(self) -> float | None:
        """Tokens per second of all sequences together, while none read its prompt."""
        return divide(self.rounds.whole.tokens, self.rounds.whole.seconds)

    @property
    def mean_sequences(self) -> float | None:
        """Sequences in a step, on average."""
        return divide(self.rounds.stepped_sequences, self.rounds.whole.steps)

    @property
    def best(self) -> int | None:
        """Number of the sequence with the highest mean log probability; None without scores."""
        values = [item.mean_log_probability for item in self.sequences]
        known = [(value, -number) for number, value in enumerate(values) if value is not None]
        return -max(known)[1] if known else None


P = TypeVar("P")
Result = TypeVar("Result")


class _Running(Iterator[P], Generic[P, Result]):
    """Requests under way: an iterator of pieces, with a result at its end."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        scheduler: Scheduler,
        read_statistics: Callable[[], RunStatistics],
        progress: Callable[[float], None],
    ) -> None:
        """``progress`` is told the share of each prompt that is done, one after the other."""
        self._tickets = [Ticket(request, progress=progress) for request in requests]
        self._scheduler = scheduler
        self._read_statistics = read_statistics
        self.finished: dict[int, SequenceResult] = {}
        """Sequences that have ended so far, by the number of their prompts."""
        self._result: Result | None = None
        self._pieces = self._generate()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> P:
        return self._show(*next(self._pieces))

    def close(self) -> None:
        """Give up unfinished sequences: the places are free for others."""
        self._pieces.close()

    @property
    def result(self) -> Result:
        """The result; remaining tokens are generated first."""
        for _ in self:
            pass
        assert self._result is not None, "the generation was interrupted"
        return self._result

    @abstractmethod
    def _show(self, number: int, text: str) -> P: ...

    @abstractmethod
    def _describe(self, statistics: RunStatistics, rounds: Rounds) -> Result: ...

    def _generate(self) -> Generator[tuple[int, str], None, None]:
        statistics, rounds = self._read_statistics(), self._scheduler.rounds
        try:
            self._scheduler.submit(*self._tickets)
            waiting = dict(enumerate(self._tickets))
            while waiting:
                self._scheduler.wait(list(waiting.values()))
                for number, ticket in list(waiting.items()):
                    if ticket.ended:
                        del waiting[number]
                        if ticket.result is not None:
                            self.finished[number] = ticket.result
                    while ticket.pieces:
                        if text := ticket.pieces.popleft().text:
                            yield number, text
                    if number not in waiting and ticket.error is not None:
                        raise ticket.error
        finally:
            for ticket in self._tickets:
                ticket.cancel()
        self._result = self._describe(
            self._read_statistics() - statistics, self._scheduler.rounds - rounds
        )


class BatchGeneration(_Running[tuple[int, str], BatchResult]):
    """Iterate over it for pieces of text as they are made, each with the number of its prompt;
    ``result`` exists once all have ended."""

    def _show(self, number: int, text: str) -> tuple[int, str]:
        return number, text

    def _describe(self, statistics: RunStatistics, rounds: Rounds) -> BatchResult:
        found = tuple(self.finished[number] for number in range(len(self._tickets)))
        return BatchResult(sequences=found, rounds=rounds, statistics=statistics)


def iterate_logits(
    parts: Parts, scheduler: Scheduler, ids: I32, mode: Literal["prefill", "decode"]
) -> Generator[F32, None, None]:
    """Logits [n, vocab] after ``ids`` [tokens]: chunk by chunk with every neuron computed, or token
    by token with the plan's predictor."""
    forward = parts.forward
    size = parts.resolved.plan.prefill.chunk if mode == "prefill" else 1
    with scheduler.borrow_place() as place:
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            with scheduler.exclude():
                if mode == "prefill":
                    found = forward.prefill(piece, all_logits=True, end=len(ids), sequence=place)
                else:
                    found = forward.step(piece.tolist(), [place]).copy()
            yield found


def embed_tokens(
    parts: Parts, scheduler: Scheduler, ids: Sequence[int], pooling: Literal["mean", "last"]
) -> F32:
    """The mean of what the head would read after ``ids``, or the last of it: [hidden], length 1."""
    tokens, chunk = np.array(ids, np.int32), parts.resolved.plan.prefill.chunk
    width = parts.resolved.model.shape.hidden
    total = np.zeros(width, np.float64)
    with scheduler.borrow_place() as place:
        for start in range(0, len(tokens), chunk):
            with scheduler.exclude():
                found = parts.forward.read_hidden(
                    tokens[start : start + chunk], end=len(tokens), sequence=place
                )
            hidden = found[:, :width].astype(np.float64)
            total = total + hidden.sum(axis=0) if pooling == "mean" else hidden[-1]
    length = float(np.linalg.norm(total))
    return (total / length if length else total).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(SequenceResult):
    """A finished generation."""

    statistics: RunStatistics
    """Counters of the model from its beginning to its end, including work for others."""


class Generation(_Running[str, GenerationResult]):
    """Iterate over it for the text as it is made; ``result`` exists once it has ended."""

    def _show(self, number: int, text: str) -> str:
        return text

    def _describe(self, statistics: RunStatistics, rounds: Rounds) -> GenerationResult:
        found = self.finished[0]
        values = {name: getattr(found, name) for name in found.__dataclass_fields__}
        return GenerationResult(**values, statistics=statistics)


class AsyncGeneration(AsyncIterator[str]):
    """Iterate over it with ``async for`` for the text as it is made."""

    def __init__(self, ticket: Ticket, pieces: AsyncIterator[str]) -> None:
        self._ticket = ticket
        self._pieces = pieces

    def __aiter__(self) -> AsyncGeneration:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    @property
    def result(self) -> SequenceResult:
        """The result of an ended generation."""
        assert self._ticket.result is not None, "it goes on, or was given up"
        return self._ticket.result

    def cancel(self) -> None:
        """Give it up: its place is free for another one before the next token."""
        self._ticket.cancel()
