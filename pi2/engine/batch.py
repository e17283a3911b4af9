"""Several sequences that generate at the same time: each has a place, and the next prompt in line
takes the place of one that has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pi2.engine.forward import Forward
from pi2.engine.generation import Answer, GenerationRequest, SequenceResult
from pi2.engine.statistics import RunStatistics, divide
from pi2.engine.text import TokenDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """All sequences, finished."""

    sequences: tuple[SequenceResult, ...]
    """In the order of their prompts.  The times of each include what was done for others
    meanwhile."""
    steps: int
    """Steps, of a token each of the sequences that went on."""
    stepped_tokens: int
    """Tokens that they made: all but the first of each sequence."""
    steps_s: float
    """Seconds in them."""
    prefill_s: float
    """Seconds in prompts."""
    statistics: RunStatistics
    """Counters of all of them."""

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens per second."""
        return divide(sum(item.prompt_tokens for item in self.sequences), self.prefill_s)

    @property
    def decode_tokens_s(self) -> float | None:
        """Tokens per second of all sequences together, while none read its prompt."""
        return divide(self.stepped_tokens, self.steps_s)

    @property
    def mean_sequences(self) -> float | None:
        """Sequences in a step, on average."""
        return divide(self.stepped_tokens, self.steps)


class BatchGeneration(Iterator[tuple[int, str]]):
    """Iterate over it for pieces of text as they are made, each with the number of its prompt;
    ``result`` is there when all have ended."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        *,
        forward: Forward,
        make_decoder: Callable[[], TokenDecoder],
        context: int,
        read_statistics: Callable[[], RunStatistics],
        progress: Callable[[float], None],
    ) -> None:
        """``progress`` is told the share of each prompt that is done, one prompt after the
        other."""
        self._requests = requests
        self._forward = forward
        self._make_decoder = make_decoder
        self._context = context
        self._read_statistics = read_statistics
        self._progress = progress
        self._prefill_s = self._steps_s = 0.0
        self._steps = self._stepped = 0
        self.finished: dict[int, SequenceResult] = {}
        """Sequences that have ended so far, by the number of their prompts."""
        self._result: BatchResult | None = None
        self._pieces = self._generate()

    def __iter__(self) -> BatchGeneration:
        return self

    def __next__(self) -> tuple[int, str]:
        return next(self._pieces)

    @property
    def result(self) -> BatchResult:
        """The result; what is still to be generated is generated first."""
        for _ in self:
            pass
        assert self._result is not None, "the generation was interrupted"
        return self._result

    def _generate(self) -> Iterator[tuple[int, str]]:
        before = self._read_statistics()
        self._forward.reset_all()
        run = self._forward.run
        waiting = deque(range(len(self._requests)))
        free = list(range(len(self._forward.positions)))
        places: dict[int, int] = {}
        """Places of the prompts that have one, by their numbers."""
        answers: dict[int, Answer] = {}
        while waiting or places:
            found = []
            while waiting and free:
                number = waiting.popleft()
                places[number] = free.pop(0)
                answers[number] = Answer(
                    self._requests[number], self._make_decoder(), self._context
                )
                found.append((number, self._read_prompt(answers[number], places[number])))
                self._free_ended(answers, places, free)
            if places:
                found += self._step(answers, places)
                self._free_ended(answers, places, free)
            for number, piece in found:
                if piece:
                    yield number, piece
                    self._forward.check_run(run)
        self._result = BatchResult(
            sequences=tuple(self.finished[number] for number in range(len(answers))),
            steps=self._steps,
            stepped_tokens=self._stepped,
            steps_s=self._steps_s,
            prefill_s=self._prefill_s,
            statistics=self._read_statistics() - before,
        )

    def _free_ended(
        self, answers: dict[int, Answer], places: dict[int, int], free: list[int]
    ) -> None:
        """Give back the places of sequences that have ended."""
        for number in list(places):
            if answers[number].reason is not None:
                free.append(places.pop(number))
                self.finished[number] = answers[number].describe()

    def _read_prompt(self, answer: Answer, place: int) -> str:
        """Read a prompt into a place and draw the first token; the text that it makes."""
        start = time.perf_counter()
        self._forward.reset(place)
        logits = self._forward.prefill(answer.prompt_ids, progress=self._progress, sequence=place)
        piece = answer.take(logits[0])
        self._prefill_s += time.perf_counter() - start
        return piece

    def _step(self, answers: dict[int, Answer], places: dict[int, int]) -> list[tuple[int, str]]:
        """Draw a token of every sequence that has a place; the text that they make."""
        start = time.perf_counter()
        tokens = [answers[number].last_token for number in places]
        logits = self._forward.step(tokens, list(places.values()))
        found = [
            (number, answers[number].take(row)) for number, row in zip(places, logits, strict=True)
        ]
        self._steps_s += time.perf_counter() - start
        self._steps += 1
        self._stepped += len(tokens)
        return found
