"""Requests, in line and under way, and the tokens and text of their answers, one by one."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.engine.sampling import Bias, Repeats, Sampler, SamplingOptions
from pi2.engine.statistics import divide


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


FinishReason = Literal["eos", "stop", "length", "context", "repeats"]
"""Why a generation ended: end token, stop string, token limit, no room in the KV cache, or because
it only repeated itself."""


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


_CUT = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers make of bytes that are no character, or not yet."""
MAX_HELD = 16
"""Tokens whose text is held back: a character has at most four bytes, so these will be none."""


class TokenDecoder:
    """Turns one token after the other into text, whole characters at a time.

    Tokens are decoded together with the piece before, because the text of a token can depend on its
    neighbours (spaces, bytes of one character). The first tokens continue a prompt: their text
    includes a leading space, such as Llama 2's, that decoders leave out at the start of a text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` gives the text of token ids."""
        self._decode = decode
        self._before: list[int] = []
        self._held: list[int] = []

    def read_token(self, token: int) -> str:
        return self._decode([token])

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._read_held()
        if text.endswith(_CUT) and len(self._held) < MAX_HELD:
            return ""
        if text:
            self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return the remaining text at the end; bytes that are no character become U+FFFD."""
        text, self._held = self._read_held(), []
        return text

    def _read_held(self) -> str:
        # At the beginning, the tokens themselves stand for what comes before them.
        before = self._before or self._held
        return self._decode([*before, *self._held])[len(self._decode(before)) :]


def find_overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``marks``."""
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    return most


class StopFilter:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that has appeared."""
        self.stopped = False
        """Whether a stop string has appeared; text after it is dropped."""

    def push(self, piece: str) -> str:
        """Take ``piece`` and return the text that is certain."""
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            first, self.found = min(found)
            self.stopped = True
            self._held = ""
            return text[:first]
        cut = len(text) - find_overlap(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held


class Answer:
    """The tokens of a request so far."""

    def __init__(self, request: GenerationRequest, decoder: TokenDecoder, context: int) -> None:
        """``decoder``: a new one; ``context``: tokens of a sequence. The clock starts."""
        self._request = request
        self._decoder = decoder
        self._context = context
        self._sampler = Sampler(request.sampling, decoder.read_token)
        self._repeats = Repeats() if request.sampling.end_repeats else None
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
            elif self._repeats is not None and self._repeats.note(
                self._ids[self._prompt : self._count]
            ):
                self.reason = "repeats"
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
