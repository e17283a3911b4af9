"""Text out of a prompt: an iterator of pieces with a result at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pi2.engine.forward import Forward
from pi2.engine.sampling import Sampler, SamplingOptions
from pi2.engine.statistics import RunStatistics, divide
from pi2.engine.text import StopFilter, TokenDecoder

FinishReason = Literal["eos", "stop", "length", "context"]
"""Why a generation ended: end token, stop string, token limit, or no room in the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished generation."""

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
    statistics: RunStatistics
    """Counters of this generation."""

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens per second."""
        return divide(self.prompt_tokens, self.ttft_s)

    @property
    def decode_tokens_s(self) -> float | None:
        """Generated tokens per second, the first not counted."""
        return divide(len(self.token_ids) - 1, self.decode_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate."""

    prompt_ids: Sequence[int]
    max_tokens: int
    stop: Sequence[str]
    stop_ids: frozenset[int]
    sampling: SamplingOptions


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
        request, forward = self._request, self._forward
        before = self._read_statistics()
        sampler = Sampler(request.sampling)
        stop_filter = StopFilter(request.stop)
        ids = np.empty(len(request.prompt_ids) + request.max_tokens, np.int64)
        ids[: len(request.prompt_ids)] = request.prompt_ids
        count = len(request.prompt_ids)
        text: list[str] = []

        start = first = now = time.perf_counter()
        forward.reset()
        logits = forward.prefill(ids[:count].astype(np.int32), progress=self._progress)[0]
        reason: FinishReason = "length"
        while True:
            token = sampler.sample(logits, ids[:count])
            ids[count] = token
            count += 1
            now = time.perf_counter()
            if count == len(request.prompt_ids) + 1:
                first = now
            if token in request.stop_ids:
                reason = "eos"
                break
            piece = stop_filter.push(self._decoder.push(token))
            if piece:
                text.append(piece)
                yield piece
            if stop_filter.stopped:
                reason = "stop"
                break
            if count == len(ids):
                break
            if forward.position == self._context:
                reason = "context"
                break
            logits = forward.decode(token)
        last = stop_filter.push(self._decoder.flush())
        if not stop_filter.stopped:
            last += stop_filter.flush()
        if last:
            text.append(last)
            yield last
        self._result = GenerationResult(
            text="".join(text),
            token_ids=tuple(int(token) for token in ids[len(request.prompt_ids) : count]),
            prompt_tokens=len(request.prompt_ids),
            finish_reason=reason,
            ttft_s=first - start,
            decode_s=now - first,
            statistics=self._read_statistics() - before,
        )
