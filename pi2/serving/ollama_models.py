"""What Ollama's clients ask of models: which there are, and what each is and can do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from pi2.diagnostics import UserError
from pi2.model.tensors import list_tensors
from pi2.serving import openai_schema
from pi2.serving.completions import can_fill
from pi2.serving.dialects import Operation
from pi2.serving.errors import ApiError
from pi2.serving.host import Host
from pi2.serving.openai_schema import Fields, Text, Tolerant
from pi2.serving.requests import JsonResponse, Service, use_model

VERSION = "0.13.0"
"""Version of Ollama's interface that this is."""


class ModelRequest(Tolerant):
    """A body; what is unknown is ignored, as Ollama does."""

    fields: ClassVar[Fields] = openai_schema.OLLAMA

    model: Text = Field(validation_alias=AliasChoices("model", "name"))


def write_time(seconds: float) -> str:
    """Seconds since 1970 as Ollama writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def has_template(host: Host) -> bool:
    """Whether a loaded model has a chat template; UserError P608 if that is broken."""
    try:
        host.find_chat_facts()
    except UserError as error:
        if error.diagnostics[0].code == "P609":
            return False
        raise
    return True


async def show_model(request: Request, service: Service, body: ModelRequest) -> Response:
    async with use_model(request, service, body.model) as (host, _):
        model, plan = host.model.plan.model, host.model.plan.plan
        capabilities, template = ["completion"], ""
        if has_template(host):
            facts = host.find_chat_facts()
            template = host.read_template()
            capabilities.append("tools")  # a template that knows none is told of them
            capabilities += ["thinking"] if facts.reasoning else []
        capabilities += ["insert"] if can_fill(host) else []
        capabilities += ["embedding"] if host.model.can_embed else []
        sampling = dict(plan.sampling)
        return JsonResponse(
            {
                "license": model.licence,
                "modelfile": f"# pi2 serves the plan {host.plan.name}\nFROM {host.plan.name}\n",
                "parameters": "\n".join(f"{key} {value}" for key, value in sampling.items()),
                "template": template,
                "details": _describe_details(host),
                "model_info": {
                    "general.architecture": model.id,
                    "general.parameter_count": _count_weights(host),
                    f"{model.id}.context_length": plan.kv.context,
                    f"{model.id}.embedding_length": model.shape.hidden,
                    f"{model.id}.block_count": model.shape.layers,
                },
                "capabilities": capabilities,
                "modified_at": write_time(host.created),
            }
        )


async def list_tags(request: Request, service: Service) -> Response:
    """The served plans, as Ollama lists models."""
    hosts = list(service.hosts.hosts.values())
    return JsonResponse({"models": await asyncio.to_thread(_describe_all, hosts)})


async def list_running(request: Request, service: Service) -> Response:
    """The models in memory."""
    hosts = [host for host in service.hosts.hosts.values() if host.is_loaded]
    found = await asyncio.to_thread(_describe_all, hosts)
    for host, told in zip(hosts, found, strict=True):
        told |= {
            "size_vram": 0,
            "context_length": host.read_plan().plan.kv.context,
            # They stay until another one needs their place.
            "expires_at": "2318-01-01T00:00:00Z",
        }
    return JsonResponse({"models": found})


async def show_version(request: Request, service: Service) -> Response:
    """The interface's version."""
    return JsonResponse({"version": VERSION})


async def refuse_change(request: Request, service: Service) -> Response:
    """ApiError 400: a server has the models with which it was started."""
    raise ApiError(
        400,
        "This server has the models that it was started with: `pi2 pull` fetches others, and "
        "`pi2 serve` serves them.",
    )


def _describe_all(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{host.plan.name}:latest",
            "model": f"{host.plan.name}:latest",
            "modified_at": write_time(host.created),
            "size": host.plan.budget_bytes,
            "digest": host.read_plan().digest,
            "details": _describe_details(host),
        }
        for host in hosts
    ]


def _describe_details(host: Host) -> dict[str, Any]:
    model = host.read_plan().model
    return {
        "parent_model": "",
        "format": "pi2",
        "family": model.id,
        "families": [model.id],
        "parameter_size": f"{_count_weights(host) / 1e9:.1f}B",
        "quantization_level": model.quantization.ffn,
    }


def _count_weights(host: Host) -> int:
    model = host.read_plan().model
    matrices = 3 if model.ffn.gated else 2
    neurons = model.shape.layers * model.layer_neurons
    dense = sum(tensor.rows * tensor.length for tensor in list_tensors(model, None))
    return dense + neurons * matrices * model.shape.hidden


SHOW = Operation("/api/show", ModelRequest, "What a model is and can do (Ollama).", show_model)
