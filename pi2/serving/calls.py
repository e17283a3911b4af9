"""Requests to the model, and its answers: the same for every interface."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from pi2.diagnostics import UserError
from pi2.engine.answer import Constraint, FinishReason, Ticket, TokenScore
from pi2.engine.generation import stream_pieces
from pi2.serving.answer_reader import AnswerReader, Fragment, Items, make_plain_reader
from pi2.serving.call_grammars import make_constraint, write_call_grammar, write_json_grammar
from pi2.serving.call_patterns import ToolCall
from pi2.serving.conversation import Conversation, list_calls, read_arguments, render_prompt
from pi2.serving.errors import ApiError, explain_user_error
from pi2.serving.hosts import Host
from pi2.serving.metrics import Metrics

End = Literal["stop", "length", "tool_calls"]
_ENDS: Mapping[str, End] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "repeats": "stop",
}
_UNUSUAL = ("context", "repeats")
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server lets requests take."""

    waiting: int = 256
    """Sequences of a model that may wait for a place; more are sent away (429)."""
    time_s: float = 600.0
    """Seconds from a request to the end of its answer (504)."""
    spent_s: float = 0.0
    """Seconds of these that a request has waited for its model to be loaded."""

    @property
    def left_s(self) -> float:
        return max(0.0, self.time_s - self.spent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Sequences that begin with the same prompt."""

    prompt_ids: Sequence[int]
    count: int = 1
    """How many; number n draws with ``seed + n``."""
    client: str = ""
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    alternatives: int | None = None
    scores_prompt: bool = False
    """Whether the prompt's tokens are reported as well; needs ``alternatives``."""
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Stated sampling options; the plan has the others."""
    make_constraint: Callable[[], Constraint] | None = None
    make_reader: Callable[[], AnswerReader] = make_plain_reader
    most_calls: int | None = None
    """Most calls of an answer; further calls are left out."""
    shown_ids: frozenset[int] = frozenset()
    prompt_text: str | None = None
    """Text of a conversation, which may go on."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The answer of a sequence so far."""

    index: int
    items: Sequence[Fragment | ToolCall]
    scores: Sequence[TokenScore] = ()
    prompt_scores: Sequence[TokenScore] = ()
    """Scores of the prompt's tokens except the first, if requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    index: int
    reason: End
    stop_text: str | None
    """The stop string that ended it."""
    tokens: int
    """Tokens that it has made."""
    reasoning_tokens: int
    reused_tokens: int
    """Tokens of the prompt that were not read again."""
    prompt_s: float
    """Seconds from its beginning to the first token."""
    decode_s: float
    """Seconds from the first token to the last."""
    cause: FinishReason

    def describe(self) -> dict[str, Any]:
        """OpenAI's reason, and pi2's own where OpenAI has no word for it."""
        more = {"finish_details": {"type": self.cause}} if self.cause in _UNUSUAL else {}
        return {"finish_reason": self.reason, **more}


async def prepare_chat(host: Host, conversation: Conversation, ask: Mapping[str, Any]) -> Ask:
    """The request for a conversation's next message, with values of `Ask`; ApiError 400."""
    try:
        return await asyncio.to_thread(_prepare_chat, host, conversation, ask)
    except UserError as error:
        raise explain_user_error(error) from None


def _prepare_chat(host: Host, conversation: Conversation, ask: Mapping[str, Any]) -> Ask:
    facts, model = host.find_chat_facts(), host.model
    prompt = _render_as_sampled(host, conversation)
    ids = model.begin(host.replay.encode(prompt, model.encode_text))
    has_tools = bool(conversation.tools) and conversation.tool_choice != "none"
    tools = conversation.tools if has_tools else None
    grammar = None
    if has_tools and (conversation.tool_choice == "required" or conversation.named_tool):
        wanted = [
            tool
            for tool in conversation.tools
            if conversation.named_tool in (None, tool.get("name"))
        ]
        grammar = write_call_grammar(
            facts,
            wanted,
            prompt=prompt,
            is_parallel=conversation.parallel_calls is True and conversation.named_tool is None,
            may_reason=conversation.may_reason,
        )
    elif conversation.json_schema is not None:
        grammar = write_json_grammar(
            facts, conversation.json_schema, prompt=prompt, may_reason=conversation.may_reason
        )
    constraint = None
    if grammar is not None:
        vocab = model.plan.model.shape.vocab
        constraint = model.texts.constrain(
            lambda: make_constraint(host.find_vocabulary(), grammar, vocab)
        )
    return Ask(
        prompt_ids=ids,
        make_constraint=constraint,
        make_reader=lambda: facts.make_reader(tools=tools, prompt=prompt),
        most_calls=1 if conversation.parallel_calls is False else None,
        shown_ids=facts.shown_ids,
        prompt_text=prompt,
        **ask,
    )


def _render_as_sampled(host: Host, conversation: Conversation) -> str:
    """The prompt, with calls as the model wrote them if that continues an earlier turn."""
    prompt = render_prompt(host, conversation)
    calling = {
        number: (message.get("content") or "", list_calls(message))
        for number, message in enumerate(conversation.messages)
        if message.get("tool_calls")
    }
    known = zip(calling, host.replay.recall(list(calling.values())), strict=True)
    written = {number: text for number, text in known if text is not None}
    if not written:
        return prompt
    try:
        sampled = render_prompt(host, conversation, written)
    except UserError:
        return prompt  # a template that wants to see its calls
    return max(prompt, sampled, key=host.replay.measure)


class Answers:
    """Sequences under way; raises ApiError 400 or 429 at once, 504 later.  Closing gives all up."""

    def __init__(self, host: Host, asks: Sequence[Ask], limits: Limits, metrics: Metrics) -> None:
        """Sequences are numbered in the order of ``asks``."""
        self._host = host
        self._tickets = _make_tickets(host, asks, limits)
        self._events: asyncio.Queue[Delta | Finished | Exception] = asyncio.Queue()
        try:
            # Together, so that a prompt is read once.
            host.driver.submit(*self._tickets)
        except UserError as error:
            raise explain_user_error(error) from None
        owners = [ask for ask in asks for _ in range(ask.count)]
        self._tasks = [
            asyncio.create_task(_follow(host, ask, ticket, number, self._events, metrics))
            for number, (ask, ticket) in enumerate(zip(owners, self._tickets, strict=True))
        ]
        self._going = len(self._tasks)
        # `asyncio.timeout` would end the task that asks for the first event: others may ask for
        # the rest.
        late = ApiError(504, f"the answer took more than {limits.time_s:g} s")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limits.left_s, self._give_up, late)

    def _give_up(self, reason: ApiError | None = None) -> None:
        if reason is not None:
            self._events.put_nowait(reason)
        # At once: whoever should take the event may not read.
        for task in self._tasks:
            task.cancel()
        for ticket in self._tickets:
            if not ticket.ended:
                self._host.driver.cancel(ticket)

    @property
    def going(self) -> bool:
        return self._going > 0

    async def take(self, wait_s: float | None = None) -> Delta | Finished | None:
        """The next part; None if nothing has come after ``wait_s`` seconds."""
        try:
            async with asyncio.timeout(wait_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Exception):
            raise event
        self._going -= isinstance(event, Finished)
        return event

    async def collect(self) -> list[Collected]:
        found = [Collected() for _ in self._tickets]
        while self.going:
            event = await self.take()
            if isinstance(event, Finished):
                found[event.index].end = event
            elif event is not None:
                found[event.index].add(event)
        return found

    async def close(self) -> None:
        self._timer.cancel()
        self._give_up()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _make_tickets(host: Host, asks: Sequence[Ask], limits: Limits) -> list[Ticket]:
    scheduler, count = host.model.scheduler, sum(ask.count for ask in asks)
    if count > MAX_CHOICES:
        raise ApiError(400, f"A request may have {MAX_CHOICES} sequences at most.", param="n")
    free = max(0, scheduler.places - scheduler.running)
    if scheduler.waiting + count > limits.waiting + free:
        raise ApiError(
            429,
            "Too many requests are waiting for this model.",
            code="rate_limit_exceeded",
            retry_after_s=max(1, min(60, scheduler.waiting // max(1, scheduler.places))),
        )
    try:
        return [_make_ticket(host, ask, number) for ask in asks for number in range(ask.count)]
    except UserError as error:
        raise explain_user_error(error) from None


def _make_ticket(host: Host, ask: Ask, number: int) -> Ticket:
    sampling = dict(ask.sampling)
    seed = sampling.pop("seed", None)
    request = host.model.describe_request(
        ask.prompt_ids,
        max_tokens=ask.max_tokens,
        least=0,
        stop=ask.stop,
        ignore_eos=ask.ignore_eos,
        alternatives=ask.alternatives,
        scores_prompt=ask.scores_prompt,
        make_constraint=ask.make_constraint,
        shown_ids=ask.shown_ids,
        seed=None if seed is None else seed + number,
        **sampling,
    )
    return Ticket(request, client=ask.client)


async def _follow(
    host: Host,
    ask: Ask,
    ticket: Ticket,
    index: int,
    events: asyncio.Queue[Delta | Finished | Exception],
    metrics: Metrics,
) -> None:
    name, start, reader = host.plan.name, time.perf_counter(), ask.make_reader()
    first_s, made, reasoning_tokens, taken = None, Collected(), 0, 0

    async def give(items: Items, scores: Sequence[TokenScore] = ()) -> None:
        delta = Delta(index, _drop_surplus(items, len(made.calls), ask.most_calls), scores)
        made.add(delta)
        if delta.items or scores:
            await events.put(delta)

    try:
        async with aclosing(stream_pieces(host.driver, ticket, submitted=True)) as pieces:
            async for piece in pieces:
                if first_s is None:
                    first_s = time.perf_counter() - start
                    metrics.note_first_token(name, first_s, ticket)
                    if ticket.prompt_scores:
                        await events.put(Delta(index, (), (), ticket.prompt_scores))
                thoughts = len(made.reasoning)
                await give(reader.push(piece.text), piece.scores)
                assert ticket.answer is not None
                count = ticket.answer.made_tokens
                if len(made.reasoning) > thoughts:
                    reasoning_tokens += count - taken
                taken = count
        await give(reader.flush())
        result, answer = ticket.result, ticket.answer
        assert result is not None and answer is not None
        if first_s is None and ticket.prompt_scores:
            await events.put(Delta(index, (), (), ticket.prompt_scores))
        if ask.prompt_text is not None:
            host.replay.note_answer(ask.prompt_text, ask.prompt_ids, result)
            if made.calls and result.finish_reason == "eos":
                named = [(call.name, read_arguments(call.arguments)) for call in made.calls]
                host.replay.note_calls(made.content, named, result.text)
        reason = _ENDS[result.finish_reason]
        metrics.note_end(name, reason, result, time.perf_counter() - start, ticket)
        await events.put(
            Finished(
                index=index,
                reason="tool_calls" if made.calls and reason == "stop" else reason,
                stop_text=answer.stop_text,
                tokens=len(result.token_ids),
                reasoning_tokens=reasoning_tokens,
                reused_tokens=ticket.reused_tokens,
                prompt_s=result.ttft_s,
                decode_s=result.decode_s,
                cause=result.finish_reason,
            )
        )
    except asyncio.CancelledError:
        metrics.note_abort(name)
        raise
    except UserError as error:
        metrics.note_error(name, error)
        await events.put(explain_user_error(error))
    except Exception as error:
        metrics.note_error(name, error)
        await events.put(ApiError(500, "the server has failed; its log says why"))


def _drop_surplus(items: Items, made: int, most: int | None) -> Items:
    """The items without the calls that, after ``made`` earlier ones, are more than ``most``."""
    if most is None:
        return items
    found: Items = []
    for item in items:
        if isinstance(item, ToolCall):
            made += 1
            if made > most:
                continue
        found.append(item)
    return found


@dataclass(slots=True)
class Collected:
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: Sequence[TokenScore] = ()
    end: Finished | None = None

    def add(self, delta: Delta) -> None:
        for item in delta.items:
            if isinstance(item, ToolCall):
                self.calls.append(item)
            elif item.part == "reasoning":
                self.reasoning += item.text
            else:
                self.content += item.text
        self.scores += delta.scores
        self.prompt_scores = self.prompt_scores or delta.prompt_scores
