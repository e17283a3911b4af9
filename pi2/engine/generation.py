"""Text out of a prompt: an iterator of pieces with a result at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass

from pi2.engine.answer import GenerationRequest, SequenceResult
from pi2.engine.scheduler import Scheduler, Ticket
from pi2.engine.statistics import RunStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(SequenceResult):
    """A finished generation."""

    statistics: RunStatistics
    """Counters of the model from its beginning to its end, with what was done for others
    meanwhile."""


class Generation(Iterator[str]):
    """Iterate over it for the text as it is made; ``result`` is there when it has ended."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        scheduler: Scheduler,
        read_statistics: Callable[[], RunStatistics],
        progress: Callable[[float], None],
    ) -> None:
        """``progress`` is told the share of the prompt that is done."""
        self._ticket = Ticket(request, progress=progress)
        self._scheduler = scheduler
        self._read_statistics = read_statistics
        self._result: GenerationResult | None = None
        self._pieces = self._generate()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Give it up: its place is free for another one."""
        self._pieces.close()

    @property
    def result(self) -> GenerationResult:
        """The result; what is still to be generated is generated first."""
        for _ in self:
            pass
        assert self._result is not None, "the generation was interrupted"
        return self._result

    def _generate(self) -> Generator[str, None, None]:
        ticket = self._ticket
        before = self._read_statistics()
        self._scheduler.submit(ticket)
        try:
            while True:
                self._scheduler.wait([ticket])
                ended = ticket.ended
                while ticket.pieces:
                    if text := ticket.pieces.popleft().text:
                        yield text
                if ended:
                    break
        finally:
            ticket.cancel()
        if ticket.error is not None:
            raise ticket.error
        found = ticket.result
        assert found is not None
        values = {name: getattr(found, name) for name in found.__dataclass_fields__}
        self._result = GenerationResult(**values, statistics=self._read_statistics() - before)


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
        """The result of what has ended."""
        assert self._ticket.result is not None, "it goes on, or was given up"
        return self._ticket.result

    def cancel(self) -> None:
        """Give it up: its place is free for another one before the next token."""
        self._ticket.cancel()
