"""Text out of a prompt: an iterator of pieces with a result at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pi2.arrays import F32, I32
from pi2.engine.forward import Forward
from pi2.engine.sampling import Sampler, SamplingOptions
from pi2.engine.statistics import RunStatistics, divide
from pi2.engine.text import StopFilter, TokenDecoder

FinishReason = Literal["eos", "stop", "length", "context"]
"""Why a generation ended: end token, stop string, token limit, or no room in the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """A finished sequence."""

    text: str
    """Everything that was generated, without the prompt."""
    token_ids: tuple[int, ...]
    """Ids that were generated, end token included."""
    prompt_tokens: int
    """Tokens of the prompt."""
    finish_reason: FinishReason
    """Why it ended."""
    ttft_s: float
    """Time to first token, in seconds."""
    decode_s: float
    """Time from the first token to the last, in seconds."""

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens per second."""
        return divide(self.prompt_tokens, self.ttft_s)

    @property
    def decode_tokens_s(self) -> float | None:
        """Generated tokens per second, the first not counted."""
        return divide(len(self.token_ids) - 1, self.decode_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(SequenceResult):
    """A finished generation."""

    statistics: RunStatistics
    """Counters of this generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate."""

    prompt_ids: Sequence[int]
    max_tokens: int
    stop: Sequence[str]
    stop_ids: frozenset[int]
    sampling: SamplingOptions


class Answer:
    """What has been generated of a request so far."""

    def __init__(self, request: GenerationRequest, decoder: TokenDecoder, context: int) -> None:
        """``decoder`` is a new one; ``context``: tokens that a sequence has room for.  The clock
        starts now."""
        self._request = request
        self._decoder = decoder
        self._context = context
        self._sampler = Sampler(request.sampling)
        self._stop_filter = StopFilter(request.stop)
        self._count = self._prompt = len(request.prompt_ids)
        self._ids = np.empty(self._prompt + request.max_tokens, np.int64)
        self._ids[: self._prompt] = request.prompt_ids
        self._text: list[str] = []
        self._start = self._first = self._now = time.perf_counter()
        self.reason: FinishReason | None = None
        """Why it has ended; None as long as it goes on."""

    @property
    def prompt_ids(self) -> I32:
        """Tokens of the prompt [n]."""
        return self._ids[: self._prompt].astype(np.int32)

    @property
    def last_token(self) -> int:
        """The token that comes next through the model."""
        return int(self._ids[self._count - 1])

    def take(self, logits: F32) -> str:
        """Draw a token from ``logits`` [vocab]; return the text that has become certain."""
        assert self.reason is None, "it has ended"
        token = self._sampler.sample(logits, self._ids[: self._count])
        self._ids[self._count] = token
        self._count += 1
        self._now = time.perf_counter()
        if self._count == self._prompt + 1:
            self._first = self._now
        piece = ""
        if token in self._request.stop_ids:
            self.reason = "eos"
        else:
            piece = self._stop_filter.push(self._decoder.push(token))
            if self._stop_filter.stopped:
                self.reason = "stop"
            elif self._count == len(self._ids):
                self.reason = "length"
            elif self._count > self._context:
                # The last token has no room for its key and value.
                self.reason = "context"
        if self.reason is not None:
            piece += self._flush()
        if piece:
            self._text.append(piece)
        return piece

    def _flush(self) -> str:
        last = self._stop_filter.push(self._decoder.flush())
        return last if self._stop_filter.stopped else last + self._stop_filter.flush()

    def describe(self) -> SequenceResult:
        """The result of what has ended."""
        assert self.reason is not None, "it goes on"
        return SequenceResult(
            text="".join(self._text),
            token_ids=tuple(int(token) for token in self._ids[self._prompt : self._count]),
            prompt_tokens=self._prompt,
            finish_reason=self.reason,
            ttft_s=self._first - self._start,
            decode_s=self._now - self._first,
        )


class Generation(Iterator[str]):
    """Iterate over it for the text as it is made; ``result`` is there when it has ended."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        forward: Forward,
        decoder: TokenDecoder,
        context: int,
        read_statistics: Callable[[], RunStatistics],
        progress: Callable[[float], None],
    ) -> None:
        """``decoder`` is a new one; ``progress`` is told the share of the prompt that is done."""
        self._request = request
        self._forward = forward
        self._decoder = decoder
        self._context = context
        self._read_statistics = read_statistics
        self._progress = progress
        self._result: GenerationResult | None = None
        self._pieces = self._generate()

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> GenerationResult:
        """The result; what is still to be generated is generated first."""
        for _ in self:
            pass
        assert self._result is not None, "the generation was interrupted"
        return self._result

    def _generate(self) -> Iterator[str]:
        forward = self._forward
        before = self._read_statistics()
        answer = Answer(self._request, self._decoder, self._context)
        forward.reset_all()
        run = forward.run
        logits = forward.prefill(answer.prompt_ids, progress=self._progress)[0]
        while True:
            piece = answer.take(logits)
            if piece:
                yield piece
                forward.check_run(run)
            if answer.reason is not None:
                break
            logits = forward.decode(answer.last_token)
        found = answer.describe()
        values = {name: getattr(found, name) for name in found.__dataclass_fields__}
        self._result = GenerationResult(**values, statistics=self._read_statistics() - before)
