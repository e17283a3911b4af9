"""``/tokenize`` and ``/detokenize``: how many tokens a text has, and which."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pi2.serving.calls import prepare_chat
from pi2.serving.chat import read_message
from pi2.serving.conversation import Conversation
from pi2.serving.dialects import Operation
from pi2.serving.errors import ApiError
from pi2.serving.openai_schema import DetokenizeRequest, TokenizeRequest
from pi2.serving.requests import JsonResponse, Service, use_model


def _choose(service: Service, model: str | None) -> str:
    return next(iter(service.hosts.hosts)) if model is None else model


async def tokenize(request: Request, service: Service, body: TokenizeRequest) -> Response:
    """Token ids of a prompt or of a conversation."""
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
    """The text of token ids, special ones included."""
    async with use_model(request, service, _choose(service, body.model)) as (host, _):
        vocab = host.model.plan.model.shape.vocab
        if any(token >= vocab for token in body.tokens):
            raise ApiError(400, f"There are {vocab} tokens.", param="tokens")
        return JsonResponse({"prompt": host.model.decode(body.tokens, special=True)})


TOKENIZE = Operation(
    "/tokenize", TokenizeRequest, "Token ids of a text or a conversation.", tokenize
)
DETOKENIZE = Operation("/detokenize", DetokenizeRequest, "The text of token ids.", detokenize)
