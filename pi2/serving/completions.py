"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pi2.diagnostics import UserError
from pi2.engine.answer import TokenScore
from pi2.serving.calls import Ask, Collected, Delta, Finished, collect, generate
from pi2.serving.errors import ApiError, explain_user_error
from pi2.serving.host import Host, describe_fingerprint
from pi2.serving.openai_schema import CompletionRequest
from pi2.serving.requests import (
    JsonResponse,
    Service,
    choose_sampling,
    describe_usage,
    find_client,
    list_stops,
    make_id,
    note_use,
    parse_body,
    stream_events,
    use_model,
    wait_for_client,
)
from pi2.serving.sse import DONE, write_event
from pi2.serving.token_scores import describe_completion_scores


def list_prompts(host: Host, prompt: str | list[int] | list[str] | list[list[int]]) -> list[Any]:
    """Token ids of each prompt; ApiError 400 for what is none."""
    texts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    try:
        return [
            host.model.encode(item) if isinstance(item, str) else [int(token) for token in item]
            for item in texts
            if isinstance(item, (str, list))
        ]
    except UserError as error:
        raise explain_user_error(error) from None


async def answer_completion(request: Request, service: Service) -> Response:
    """Continue one or more prompts."""
    body = await parse_body(request, service, CompletionRequest)
    async with AsyncExitStack() as stack:
        host, limits = await stack.enter_async_context(use_model(request, service, body.model))
        prompts = list_prompts(host, body.prompt)
        each = body.best_of or body.n or 1
        asks = [
            Ask(
                prompt_ids=ids,
                count=each,
                client=find_client(request),
                max_tokens=body.max_tokens or 16,
                stop=list_stops(body.stop),
                alternatives=_count_alternatives(body),
                ignore_eos=bool(body.ignore_eos),
                sampling=choose_sampling(body, host.model.plan.model.shape.vocab),
            )
            for ids in prompts
        ]
        if len(asks) * each > 128:
            raise ApiError(400, "A request may have 128 sequences at most.", param="n")
        writer = _Writer(host, body, asks)
        note_use(request, model=host.plan.name, prompt_tokens=writer.prompt_tokens)
        sources = [generate(host, ask, limits, service.metrics) for ask in asks]
        if not body.stream:
            found = []
            for source in sources:
                found.append(await wait_for_client(request, collect(source, each)))
            answer = writer.write_whole(found, body.n or 1)
            note_use(request, completion_tokens=answer["usage"]["completion_tokens"])
            return JsonResponse(answer)
        kept = stack.pop_all()
        events = _stream(request, writer, sources, kept)
        return await stream_events(request, events)


async def _stream(
    request: Request,
    writer: _Writer,
    sources: Sequence[AsyncGenerator[Delta | Finished, None]],
    kept: AsyncExitStack,
) -> AsyncGenerator[bytes, None]:
    async with kept:
        for number, source in enumerate(sources):
            try:
                async for event in source:
                    for chunk in writer.write_chunks(number, event):
                        yield write_event(chunk)
            finally:
                await source.aclose()
        note_use(request, completion_tokens=writer.tokens)
        if writer.includes_usage:
            yield write_event(writer.write_usage())
        yield DONE


class _Writer:
    """Writes what comes of a request as OpenAI's clients expect it."""

    def __init__(self, host: Host, body: CompletionRequest, asks: Sequence[Ask]) -> None:
        self._model = host.model
        self._asks = asks
        self._each = body.n or 1
        self._scored = body.logprobs is not None
        self._shows_ids = bool(body.return_token_ids)
        self._echoes = bool(body.echo)
        self._prompt = body.prompt
        self.includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": make_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": host.plan.name,
            "system_fingerprint": describe_fingerprint(host.model),
        }
        self._begun: set[int] = set()
        self._lengths: dict[int, int] = {}
        self._ends: list[Finished] = []
        self.prompt_tokens = sum(len(ask.prompt_ids) for ask in asks)

    @property
    def tokens(self) -> int:
        """Tokens of the sequences that have ended."""
        return sum(end.tokens for end in self._ends)

    def _echo(self, number: int) -> str:
        if not self._echoes:
            return ""
        texts = [self._prompt] if isinstance(self._prompt, str) else self._prompt
        text = texts[number] if isinstance(texts[0], str) else None
        return text if isinstance(text, str) else self._decode(number)

    def _decode(self, number: int) -> str:
        return self._model.decode(self._asks[number].prompt_ids, special=True)

    def write_whole(self, found: Sequence[Sequence[Collected]], best: int) -> dict[str, Any]:
        """The answer, complete; the ``best`` sequences of each prompt."""
        choices: list[dict[str, Any]] = []
        for number, sequences in enumerate(found):
            self._ends += [item.end for item in sequences if item.end is not None]
            echo = self._echo(number)
            kept = sequences
            if len(sequences) > best:
                kept = sorted(sequences, key=_measure_likelihood, reverse=True)[:best]
            for item in kept:
                assert item.end is not None
                text = echo + item.content
                scores = None
                if self._scored:
                    scores = describe_completion_scores(self._model, item.scores, len(echo))
                reason = "stop" if item.end.reason == "tool_calls" else item.end.reason
                choice = {
                    "index": len(choices),
                    "text": text,
                    "logprobs": scores,
                    "finish_reason": reason,
                }
                choices.append(self._add_ids(choice, item.scores))
        return {**self._head, "choices": choices, "usage": self._describe_usage()}

    def write_chunks(self, number: int, event: Delta | Finished) -> list[dict[str, Any]]:
        """The chunks that an event of prompt ``number`` makes."""
        index = number * self._each + event.index
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            if echo := self._echo(number):
                chunks.append(self._write_chunk(index, echo))
            self._lengths[index] = len(echo)
        if isinstance(event, Finished):
            self._ends.append(event)
            chunks.append(self._write_chunk(index, "", reason=event.reason))
            return chunks
        text = "".join(item.text for item in event.items if hasattr(item, "text"))
        scores = None
        if self._scored and event.scores:
            scores = describe_completion_scores(self._model, event.scores, self._lengths[index])
        self._lengths[index] += len(text)
        chunk = self._write_chunk(index, text, scores=scores)
        self._add_ids(chunk["choices"][0], event.scores)
        chunks.append(chunk)
        return chunks

    def _add_ids(self, choice: dict[str, Any], scores: Sequence[TokenScore]) -> dict[str, Any]:
        if self._shows_ids:
            choice["token_ids"] = [score.token for score in scores]
        return choice

    def _write_chunk(
        self,
        index: int,
        text: str,
        *,
        scores: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self.includes_usage else chunk

    def write_usage(self) -> dict[str, Any]:
        """The last chunk, where it is asked for."""
        return {**self._head, "choices": [], "usage": self._describe_usage()}

    def _describe_usage(self) -> Mapping[str, Any]:
        reused = sum(end.reused_tokens for end in self._ends if end.index == 0)
        return describe_usage(self.prompt_tokens, self.tokens, reused, 0)


def _count_alternatives(body: CompletionRequest) -> int | None:
    """Alternatives of each token; 0 where the tokens themselves are needed."""
    needed = body.best_of is not None or body.return_token_ids
    return 0 if body.logprobs is None and needed else body.logprobs


def _measure_likelihood(item: Collected) -> float:
    """Mean log probability of a sequence's tokens."""
    values = [score.log_probability for score in item.scores]
    return sum(values) / len(values) if values else 0.0
