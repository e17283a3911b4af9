"""``/v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.serving.calls import Limits
from pi2.serving.completions import list_prompts
from pi2.serving.errors import ApiError, explain_user_error
from pi2.serving.host import Host
from pi2.serving.openai_schema import EmbeddingRequest
from pi2.serving.requests import (
    JsonResponse,
    Service,
    note_use,
    parse_body,
    use_model,
    wait_for_client,
)


async def answer_embeddings(request: Request, service: Service) -> Response:
    """The embedding of each text."""
    body = await parse_body(request, service, EmbeddingRequest)
    async with use_model(request, service, body.model) as (host, limits):
        hidden = host.model.plan.model.shape.hidden
        if not host.model.can_embed:
            message = f"The model '{body.model}' does not support embeddings."
            raise ApiError(400, message, param="model", code="model_not_supported")
        if body.dimensions is not None and body.dimensions > hidden:
            message = f"This model has {hidden} dimensions."
            raise ApiError(400, message, param="dimensions")
        prompts = list_prompts(host, body.input)
        count = sum(map(len, prompts))
        note_use(request, model=host.plan.name, prompt_tokens=count)
        found = await wait_for_client(request, _embed(host, body, prompts, limits))
        data = [
            {"object": "embedding", "index": number, "embedding": _write(values, body)}
            for number, values in enumerate(found)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JsonResponse(
            {"object": "list", "data": data, "model": host.plan.name, "usage": usage}
        )


async def _embed(
    host: Host, body: EmbeddingRequest, prompts: Sequence[list[int]], limits: Limits
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
                    values = await asyncio.to_thread(host.model.embed, ids, pooling=body.pooling)
                found.append(values)
            return found
    except TimeoutError:
        raise ApiError(504, f"the answer took more than {limits.time_s:g} s") from None
    except UserError as error:
        raise explain_user_error(error) from None
    finally:
        host.embedding_clients -= 1


def _write(values: F32, body: EmbeddingRequest) -> Any:
    """The first dimensions, of the length 1 again, as numbers or as bytes of float32."""
    kept = values[: body.dimensions]
    if body.dimensions is not None:
        kept = kept / max(float(np.linalg.norm(kept)), 1e-30)
    if body.encoding_format == "base64":
        return base64.b64encode(kept.astype("<f4").tobytes()).decode()
    return [float(value) for value in kept]
