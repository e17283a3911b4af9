"""``/v1/embeddings``, and the embeddings of other interfaces."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.serving.calls import Limits, prepare_chat
from pi2.serving.chat import read_message
from pi2.serving.completions import list_prompts
from pi2.serving.conversation import Conversation
from pi2.serving.errors import ApiError, explain_user_error
from pi2.serving.hosts import Host
from pi2.serving.openai_schema import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from pi2.serving.requests import (
    JsonResponse,
    Operation,
    Service,
    note_use,
    use_model,
    wait_for_client,
)


def _choose(service: Service, model: str | None) -> str:
    return next(iter(service.hosts.hosts)) if model is None else model


async def tokenize(request: Request, service: Service, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give one of 'prompt' and 'messages'.", param="prompt")
    async with use_model(request, service, _choose(service, body.model)) as (host, _):
        if body.messages is not None:
            spoken = [read_message(message) for message in body.messages]
            ask = await prepare_chat(host, Conversation(messages=spoken), {})
            ids = list(ask.prompt_ids)
        elif body.add_special_tokens:
            ids = host.model.encode(body.prompt or "")
        else:
            ids = host.model.encode_text(body.prompt or "")
        context = host.model.plan.plan.kv.context
        return JsonResponse({"count": len(ids), "max_model_len": context, "tokens": ids})


async def detokenize(request: Request, service: Service, body: DetokenizeRequest) -> Response:
    async with use_model(request, service, _choose(service, body.model)) as (host, _):
        vocab = host.model.plan.model.shape.vocab
        if any(token >= vocab for token in body.tokens):
            raise ApiError(400, f"There are {vocab} tokens.", param="tokens")
        return JsonResponse({"prompt": host.model.decode(body.tokens, special=True)})


TOKENIZE = Operation(
    "/tokenize", TokenizeRequest, "Token ids of a text or a conversation.", tokenize
)
DETOKENIZE = Operation("/detokenize", DetokenizeRequest, "The text of token ids.", detokenize)


async def answer_embeddings(request: Request, service: Service, body: EmbeddingRequest) -> Response:
    async with use_model(request, service, body.model) as (host, limits):
        prompts = list_prompts(host, body.input, whole=True)
        found = await embed(
            request, host, limits, prompts, pooling=body.pooling, dimensions=body.dimensions
        )
        data = [
            {"object": "embedding", "index": number, "embedding": _write(values, body)}
            for number, values in enumerate(found)
        ]
        count = sum(map(len, prompts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JsonResponse(
            {"object": "list", "data": data, "model": host.plan.name, "usage": usage}
        )


async def embed(
    request: Request,
    host: Host,
    limits: Limits,
    prompts: Sequence[list[int]],
    *,
    pooling: Literal["mean", "last"] | None = None,
    dimensions: int | None = None,
) -> list[F32]:
    """Embeddings of ``prompts``, their first ``dimensions``, of the length 1."""
    hidden = host.model.plan.model.shape.hidden
    if not host.model.can_embed:
        message = f"The model '{host.plan.name}' does not support embeddings."
        raise ApiError(400, message, param="model", code="model_not_supported")
    if dimensions is not None and dimensions > hidden:
        raise ApiError(400, f"This model has {hidden} dimensions.", param="dimensions")
    note_use(request, model=host.plan.name, prompt_tokens=sum(map(len, prompts)))
    found = await wait_for_client(request, _embed(host, prompts, pooling, limits))
    if dimensions is None:
        return found
    kept = [values[:dimensions] for values in found]
    return [values / max(float(np.linalg.norm(values)), 1e-30) for values in kept]


async def _embed(
    host: Host,
    prompts: Sequence[list[int]],
    pooling: Literal["mean", "last"] | None,
    limits: Limits,
) -> list[F32]:
    """Embeddings one after the other; between two of them, others go on."""
    if host.embedding_clients > limits.waiting:
        message = "Too many requests are waiting for this model."
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1)
    host.embedding_clients += 1
    try:
        async with asyncio.timeout(limits.left_s):
            found = []
            for ids in prompts:
                async with host.embedding_turn:
                    values = await asyncio.to_thread(host.model.embed, ids, pooling=pooling)
                found.append(values)
            return found
    except TimeoutError:
        raise ApiError(504, f"the answer took more than {limits.time_s:g} s") from None
    except UserError as error:
        raise explain_user_error(error) from None
    finally:
        host.embedding_clients -= 1


def _write(values: F32, body: EmbeddingRequest) -> Any:
    """An embedding as numbers, or as bytes of float32."""
    if body.encoding_format == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    return [float(value) for value in values]


EMBEDDINGS = Operation(
    "/v1/embeddings", EmbeddingRequest, "Embed texts.", answer_embeddings, "embeddings"
)
