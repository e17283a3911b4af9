"""Several sequences that generate at the same time: each has a place, and the next prompt in line
takes the place of one that has ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from pi2.engine.answer import GenerationRequest, SequenceResult
from pi2.engine.rounds import Rounds
from pi2.engine.scheduler import Scheduler, Ticket
from pi2.engine.statistics import RunStatistics, divide


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """All sequences, finished."""

    sequences: tuple[SequenceResult, ...]
    """In the order of their prompts.  The times of each include what was done for others
    meanwhile."""
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
        return divide(self.rounds.stepped_tokens, self.rounds.steps_s)

    @property
    def mean_sequences(self) -> float | None:
        """Sequences in a step, on average."""
        return divide(self.rounds.stepped_sequences, self.rounds.steps)

    @property
    def best(self) -> int | None:
        """Number of the sequence with the highest mean log probability; None where nobody asked
        for them."""
        values = [item.mean_log_probability for item in self.sequences]
        known = [(value, -number) for number, value in enumerate(values) if value is not None]
        return -max(known)[1] if known else None


class BatchGeneration(Iterator[tuple[int, str]]):
    """Iterate over it for pieces of text as they are made, each with the number of its prompt;
    ``result`` is there when all have ended."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        *,
        scheduler: Scheduler,
        read_statistics: Callable[[], RunStatistics],
        progress: Callable[[float], None],
    ) -> None:
        """``progress`` is told the share of each prompt that is done, one prompt after the
        other."""
        self._tickets = [Ticket(request, progress=progress) for request in requests]
        self._scheduler = scheduler
        self._read_statistics = read_statistics
        self.finished: dict[int, SequenceResult] = {}
        """Sequences that have ended so far, by the number of their prompts."""
        self._result: BatchResult | None = None
        self._pieces = self._generate()

    def __iter__(self) -> BatchGeneration:
        return self

    def __next__(self) -> tuple[int, str]:
        return next(self._pieces)

    def close(self) -> None:
        """Give up what has not ended: the places are free for others."""
        self._pieces.close()

    @property
    def result(self) -> BatchResult:
        """The result; what is still to be generated is generated first."""
        for _ in self:
            pass
        assert self._result is not None, "the generation was interrupted"
        return self._result

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
                        if ticket.error is not None:
                            raise ticket.error
                        assert ticket.result is not None
                        self.finished[number] = ticket.result
                    while ticket.pieces:
                        if text := ticket.pieces.popleft().text:
                            yield number, text
        finally:
            for ticket in self._tickets:
                ticket.cancel()
        self._result = self._describe(
            self._read_statistics() - statistics, self._scheduler.rounds - rounds
        )

    def _describe(self, statistics: RunStatistics, rounds: Rounds) -> BatchResult:
        return BatchResult(
            sequences=tuple(self.finished[number] for number in range(len(self._tickets))),
            rounds=rounds,
            statistics=statistics,
        )
