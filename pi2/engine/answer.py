"""Requests, in line and under way, and the tokens of their answers, one by one."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from pi2.arrays import F32, I32, I64
from pi2.diagnostics import UserError
from pi2.engine.statistics import divide
from pi2.engine.text import StopFilter, TokenDecoder

Bias = NDArray[np.float32]
"""Added to logits [vocab]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn, in order: penalties, bias, temperature, top-k, top-p, min-p."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach p."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Divide the positive logits of tokens already seen by it, multiply the negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated already."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens, times how often each was generated already."""
    penalty_window: int = -1
    """The last tokens to which penalties look back; 0 turns them off, -1 is all."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single tokens, by their ids."""
    seed: int | None = None
    """Start of the random numbers; None draws one."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "penalty_window": (self.penalty_window >= -1, "-1 or more"),
            "seed": (self.seed is None or self.seed >= 0, "0 or more"),
        }
        for name, (fine, expected) in checks.items():
            if not fine:
                raise UserError.of("P604", f"{name} must be {expected}, not {getattr(self, name)}")


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of `LoadedModel.generate`; the plan has the values that are not given."""

    max_tokens: int
    """128 if it is not given."""
    stop: str | Sequence[str]
    """Texts that end the answer."""
    ignore_eos: bool
    """Go on after an end token."""
    temperature: float | None
    """As in `SamplingOptions`, like the next ones."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None


class Sampler:
    """Draws tokens; the same options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        has_penalties = options.penalty_window != 0 and (
            options.repetition_penalty != 1.0
            or bool(options.presence_penalty or options.frequency_penalty)
        )
        self._takes_best = not (options.temperature or has_penalties or options.logit_bias)

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self._options.seed)

    def sample(
        self, logits: F32, seen: I64, *, prompt: int | None = None, bias: Bias | None = None
    ) -> int:
        """A token id for ``logits`` [vocab]; ``seen`` begins with ``prompt`` ids; ``bias`` [vocab]
        may be minus infinity."""
        options = self._options
        if self._takes_best and bias is None:
            return int(logits.argmax())
        scores = logits.astype(np.float64)
        first = max(0, len(seen) - options.penalty_window) if options.penalty_window >= 0 else 0
        own = seen[max(first, len(seen) if prompt is None else prompt) :]
        seen = seen[first:]
        if options.repetition_penalty != 1.0 and len(seen):
            # An id that is seen twice gets the same score twice.  np.unique would import numpy.ma,
            # which is never freed: 1 MB.
            penalty, found = options.repetition_penalty, scores[seen]
            scores[seen] = np.where(found > 0, found / penalty, found * penalty)
        if len(own) and (options.presence_penalty or options.frequency_penalty):
            ids, counts = np.unique(own, return_counts=True)
            scores[ids] -= options.presence_penalty + options.frequency_penalty * counts
        for token, value in options.logit_bias.items():
            scores[token] += value
        if bias is not None:
            scores += bias[: len(scores)]
        if options.temperature == 0.0:
            return int(np.argmax(scores))
        scores /= options.temperature
        probabilities = np.exp(scores - scores.max())
        order = np.argsort(-probabilities, kind="stable")
        ranked = probabilities[order] / probabilities.sum()
        if options.top_k:
            ranked = ranked[: options.top_k] / ranked[: options.top_k].sum()
        if options.top_p < 1.0:
            before = np.cumsum(ranked) - ranked
            ranked = ranked[before < options.top_p]
        if options.min_p > 0.0:
            ranked = ranked[ranked >= options.min_p * ranked[0]]
        ranked = ranked / ranked.sum()
        drawn = int(np.searchsorted(np.cumsum(ranked), self._random.random(), side="right"))
        return int(order[min(drawn, len(ranked) - 1)])


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
    mean_log_probability: float | None = None
    """Mean natural logarithm of the tokens' probabilities, before penalties and temperature; None
    if it was not requested."""

    @property
    def prefill_tokens_s(self) -> float | None:
        """Prompt tokens per second."""
        return divide(self.prompt_tokens, self.ttft_s)

    @property
    def decode_tokens_s(self) -> float | None:
        """Generated tokens per second, the first not counted."""
        return divide(len(self.token_ids) - 1, self.decode_s)


class Constraint(Protocol):
    """Tells the allowed next tokens, such as continuations of a JSON document."""

    def find_bias(self) -> Bias | None:
        """What to add to the logits [vocab], minus infinity to tokens that must not come; None
        where every token may."""

    def accept(self, token: int) -> None:
        """Take notice of the token that was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate."""

    prompt_ids: Sequence[int]
    max_tokens: int
    """Most tokens of the answer; with 0 the prompt is read and nothing is generated."""
    stop: Sequence[str]
    stop_ids: frozenset[int]
    sampling: SamplingOptions
    alternatives: int | None = None
    """Most likely tokens to report with each drawn token; None reports nothing."""
    make_constraint: Callable[[], Constraint] | None = None
    """Makes what says which tokens may come; None lets all."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text; the text of others is left out."""
    scores_prompt: bool = False
    """Whether the prompt's tokens are reported as well, with as many ``alternatives``."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token was that was drawn, or that a prompt has."""

    token: int
    log_probability: float
    """Natural logarithm of its probability, before penalties and temperature."""
    alternatives: tuple[tuple[int, float], ...]
    """The most likely tokens, likeliest first, and the logarithms of theirs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token has brought."""

    text: str
    """Text that has become certain; empty where a character or a stop string may not be whole."""
    scores: tuple[TokenScore, ...] = ()
    """How likely the token was, if that was asked for."""


class Answer:
    """The tokens of a request so far."""

    def __init__(self, request: GenerationRequest, decoder: TokenDecoder, context: int) -> None:
        """``decoder``: a new one; ``context``: tokens of a sequence. The clock starts."""
        self._request = request
        self._decoder = decoder
        self._context = context
        self._sampler = Sampler(request.sampling)
        self._stop_filter = StopFilter(request.stop)
        make = request.make_constraint
        self._constraint = None if make is None else make()
        self._count = self._prompt = len(request.prompt_ids)
        # A request may allow more than there is room for: the answer ends with the context.
        most = min(request.max_tokens, context + 1 - self._prompt)
        self._ids = np.empty(self._prompt + max(most, 0), np.int64)
        self._ids[: self._prompt] = request.prompt_ids
        self._text: list[str] = []
        self._log_probability = 0.0
        """Of all tokens so far, where it is asked for."""
        self._start = self._first = self._now = time.perf_counter()
        self.reason: FinishReason | None = None
        """Why it has ended; None as long as it goes on."""

    @property
    def stop_text(self) -> str | None:
        """The stop string that has ended it."""
        return self._stop_filter.found

    @property
    def first_token_s(self) -> float:
        """Seconds from its beginning to the first token."""
        return self._first - self._start

    @property
    def prompt_ids(self) -> I32:
        """Tokens of the prompt [n]."""
        return self._ids[: self._prompt].astype(np.int32)

    @property
    def last_token(self) -> int:
        """The token that comes next through the model."""
        return int(self._ids[self._count - 1])

    @property
    def ids(self) -> I64:
        """Tokens of the prompt and of the answer so far [n]; valid until the next one is taken."""
        return self._ids[: self._count]

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return len(self._ids) - self._count

    @property
    def made_tokens(self) -> int:
        """Tokens that were generated so far."""
        return self._count - self._prompt

    def take(self, logits: F32) -> Piece:
        """Draw a token from ``logits`` [vocab], if one may come; return the certain part."""
        assert self.reason is None, "it has ended"
        if self._request.max_tokens == 0:
            self.reason, self._first = "length", time.perf_counter()
            self._now = self._first
            return Piece("")
        bias = None if self._constraint is None else self._constraint.find_bias()
        token = self._sampler.sample(
            logits, self._ids[: self._count], prompt=self._prompt, bias=bias
        )
        if self._constraint is not None:
            self._constraint.accept(token)
        self._ids[self._count] = token
        self._count += 1
        self._now = time.perf_counter()
        if self._count == self._prompt + 1:
            self._first = self._now
        text = ""
        if token in self._request.stop_ids:
            self.reason = "eos"
        else:
            text = self._stop_filter.push(self._decoder.push(token))
            if self._stop_filter.stopped:
                self.reason = "stop"
            elif self.made_tokens == self._request.max_tokens:
                self.reason = "length"
            elif self._count > self._context:
                # The last token has no room for its key and value.
                self.reason = "context"
        if self.reason is not None:
            text += self._flush()
        if text:
            self._text.append(text)
        count = self._request.alternatives
        if count is None:
            return Piece(text)
        score = score_token(logits, token, count)
        self._log_probability += score.log_probability
        return Piece(text, (score,))

    def _flush(self) -> str:
        last = self._stop_filter.push(self._decoder.flush())
        return last if self._stop_filter.stopped else last + self._stop_filter.flush()

    def describe(self) -> SequenceResult:
        """The result of an ended generation."""
        assert self.reason is not None, "it goes on"
        return SequenceResult(
            text="".join(self._text),
            token_ids=tuple(int(token) for token in self._ids[self._prompt : self._count]),
            prompt_tokens=self._prompt,
            finish_reason=self.reason,
            ttft_s=self._first - self._start,
            decode_s=self._now - self._first,
            mean_log_probability=None
            if self._request.alternatives is None
            else self._log_probability / max(self.made_tokens, 1),
        )


def score_token(logits: F32, token: int, count: int) -> TokenScore:
    """The probability of ``token`` by ``logits`` [vocab], with the ``count`` most likely ones."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    count = min(count, len(scores))
    found = np.argpartition(-scores, count - 1)[:count] if count else np.empty(0, np.int64)
    ranked = found[np.lexsort((found, -scores[found]))]
    alternatives = tuple((int(other), float(scores[other])) for other in ranked)
    return TokenScore(token, float(scores[token]), alternatives)


def tell_nobody() -> None:
    """Called by a request without a waiting caller."""


class Ticket:
    """A request in line, or under way, or ended."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        client: str = "",
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """``client``: whose it is; ``progress`` is told the share of the prompt that is done."""
        self.request = request
        self.client = client
        self.progress = progress
        self.notify: Callable[[], None] = tell_nobody
        """Called by the driver when there is something to take."""
        self.pieces: deque[Piece] = deque()
        """Generated tokens that were not taken yet."""
        self.answer: Answer | None = None
        """The generation, as soon as it has a place."""
        self.result: SequenceResult | None = None
        """The result, when it has ended by itself."""
        self.error: Exception | None = None
        """Why it has failed, if it has."""
        self.cancelled = False
        """Whether it was cancelled: its place is given to another one before the next token.  Any
        thread may set it."""
        self.ended = False
        """Whether nothing will come any more."""
        self.prompt_scores: list[TokenScore] = []
        """How likely the prompt's tokens are, but the first one, if that is asked for."""
        self.reused_tokens = 0
        """Tokens of the prompt that the KV cache had already."""
        self.shared_tokens = 0
        """Tokens of the prompt that were read for another request at the same time."""

    def cancel(self) -> None:
        self.cancelled = True


class Line:
    """Requests that wait, by client; clients take turns.  Only the driver uses it."""

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
        dropped = [ticket for ticket in self if ticket.cancelled]
        for ticket in dropped:
            own = self._clients[ticket.client]
            own.remove(ticket)
            if not own:
                del self._clients[ticket.client]
        return dropped
