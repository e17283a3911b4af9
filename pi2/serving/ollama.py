"""Ollama's interface: chats, prompts, embeddings, and what models there are."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from pi2.diagnostics import UserError
from pi2.model.tensors import list_tensors
from pi2.serving.calls import Ask, Collected, Delta, Finished, prepare_chat
from pi2.serving.chat import read_calls
from pi2.serving.completions import can_fill, describe_chat_scores, fill_gap, list_prompts
from pi2.serving.conversation import ANY_OBJECT, Conversation, read_object, set_effort
from pi2.serving.embeddings import embed
from pi2.serving.errors import ApiError, dump_json
from pi2.serving.hosts import Host
from pi2.serving.openai_schema import (
    CalledTool,
    Seed,
    Text,
    Tolerant,
    Tool,
    TopK,
    find_fields,
    keep_tools,
)
from pi2.serving.requests import (
    JsonResponse,
    Operation,
    Service,
    Writer,
    answer_with,
    describe_ask,
    use_model,
)

VERSION = "0.13.0"
"""Version of Ollama's interface that this is."""


class ModelRequest(Tolerant):
    """A body; unknown fields are ignored, as in Ollama."""

    fields = find_fields("ollama")

    model: Text = Field(validation_alias=AliasChoices("model", "name"))


def write_time(seconds: float) -> str:
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
            template = host.model.read_chat_template().source
            capabilities.append("tools")  # a template that knows none is told of them
            capabilities += ["thinking"] if facts.reasoning else []
        capabilities += ["insert"] if can_fill(host) else []
        capabilities += ["embedding"] if host.model.can_embed else []
        sampling = host.model.chat_sampling
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
    hosts = list(service.hosts.hosts.values())
    return JsonResponse({"models": await asyncio.to_thread(_describe_all, hosts)})


async def list_running(request: Request, service: Service) -> Response:
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


class Message(Tolerant):
    fields = find_fields("ollama-message")
    place: ClassVar[str] = "messages."

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_name: str | None = None


class Options(Tolerant):
    """How tokens are drawn."""

    fields = find_fields("ollama-options")
    place: ClassVar[str] = "options."

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = Field(
        default=None, alias="repeat_penalty"
    )
    penalty_window: Annotated[int, Field(ge=-1)] | None = Field(default=None, alias="repeat_last_n")
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    seed: Seed | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None


class AskingRequest(ModelRequest):
    """What chats and single prompts have in common."""

    stream: Annotated[bool, BeforeValidator(lambda given: True if given is None else given)] = True
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ChatRequest(AskingRequest):
    """``/api/chat``."""

    messages: list[Message] | None = None
    """None at all load the model."""
    tools: Annotated[list[Tool] | None, keep_tools("function")] = None


class GenerateRequest(AskingRequest):
    """``/api/generate``."""

    prompt: Text | None = None
    """None loads the model."""
    suffix: Text | None = None
    system: Text | None = None
    raw: bool | None = None


class EmbedRequest(ModelRequest):
    """``/api/embed``."""

    input: Text | list[Text]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OldEmbedRequest(ModelRequest):
    """``/api/embeddings``."""

    prompt: Text | None = None


def _read_message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = read_calls(message.tool_calls)
    if message.tool_name:
        found["name"] = message.tool_name
    return found


def _describe_ask(host: Host, body: AskingRequest, client: str) -> dict[str, Any]:
    options = body.options or Options()
    most = options.num_predict
    return {
        **describe_ask(host, options, client, most or None),
        "alternatives": (body.top_logprobs or 0) if body.logprobs else None,
    }


async def _ask_conversation(
    host: Host, body: AskingRequest, client: str, messages: Sequence[dict[str, Any]], **more: Any
) -> Ask:
    variables: dict[str, Any] = {}
    if isinstance(body.think, str):
        set_effort(variables, body.think)
    elif body.think is not None:
        variables["enable_thinking"] = body.think
    conversation = Conversation(
        messages=messages,
        json_schema=ANY_OBJECT if body.format == "json" else body.format or None,
        variables=variables,
        **more,
    )
    return await prepare_chat(host, conversation, _describe_ask(host, body, client))


async def prepare_talk(host: Host, body: ChatRequest, client: str) -> Writer:
    if not body.messages:
        return _OllamaWriter(host, body, [])
    messages = [_read_message(message) for message in body.messages]
    tools = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    ask = await _ask_conversation(host, body, client, messages, tools=tools)
    return _OllamaWriter(host, body, [ask])


async def prepare_text(host: Host, body: GenerateRequest, client: str) -> Writer:
    """The request for a prompt: a user's message, unless raw, filled in, or without a template."""
    if not body.prompt:
        return _OllamaWriter(host, body, [])
    if body.suffix or body.raw or not has_template(host):
        if body.format:
            message = "'format' goes with prompts that are messages: leave 'raw' and 'suffix' out."
            raise ApiError(400, message, param="format")
        start = f"{body.system}\n\n" if body.system and not body.raw else ""
        if body.suffix:
            ids = fill_gap(host, start + body.prompt, body.suffix)
        else:
            (ids,) = list_prompts(host, start + body.prompt)
        ask = Ask(prompt_ids=ids, **_describe_ask(host, body, client))
    else:
        messages = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        ask = await _ask_conversation(host, body, client, messages)
    return _OllamaWriter(host, body, [ask])


class _OllamaWriter(Writer):
    """Writes JSON, line by line; without anything to ask, that the model is loaded."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, host: Host, body: AskingRequest, asks: Sequence[Ask]) -> None:
        super().__init__(host, asks)
        self._body = body
        self._start = time.perf_counter_ns()

    def write_whole(self, found: Sequence[Collected]) -> dict[str, Any]:
        one = found[0] if found else Collected()
        return {**self._write(one), **self._describe_end(one.end)}

    def write_ping(self) -> bytes:
        """A line in which nothing has come: clients read every line as one of the answer."""
        return dump_json({**self._write(Collected()), "done": False}) + b"\n"

    def write_event(self, event: Delta | Finished) -> bytes:
        piece = Collected()
        if isinstance(event, Finished):
            return dump_json({**self._write(piece), **self._describe_end(event)}) + b"\n"
        piece.add(event)
        return dump_json({**self._write(piece), "done": False}) + b"\n"

    def write_end(self) -> bytes:
        """That the model is loaded, if nothing was asked."""
        return b"" if self.asks else dump_json(self.write_whole([])) + b"\n"

    def _write(self, piece: Collected) -> dict[str, Any]:
        found = {"model": self._body.model, "created_at": write_time(time.time())}
        thinking = {"thinking": piece.reasoning} if piece.reasoning else {}
        scores = {}
        if self._body.logprobs and piece.scores:
            scores["logprobs"] = describe_chat_scores(self.host.model, piece.scores)["content"]
        if isinstance(self._body, GenerateRequest):
            return {**found, "response": piece.content, **thinking, **scores}
        message: dict[str, Any] = {"role": "assistant", "content": piece.content, **thinking}
        if piece.calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": read_object(call.arguments)}}
                for call in piece.calls
            ]
        return {**found, "message": message, **scores}

    def _describe_end(self, end: Finished | None) -> Mapping[str, Any]:
        if end is None:
            return {"done": True, "done_reason": "load"}
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": time.perf_counter_ns() - self._start,
            "load_duration": 0,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": int(end.prompt_s * 1e9),
            "eval_count": end.tokens,
            "eval_duration": int(end.decode_s * 1e9),
        }


async def answer_embed(request: Request, service: Service, body: EmbedRequest) -> Response:
    start = time.perf_counter_ns()
    texts = [body.input] if isinstance(body.input, str) else body.input
    async with use_model(request, service, body.model) as (host, limits):
        context = host.model.plan.plan.kv.context
        prompts = list_prompts(host, texts, whole=True) if texts and texts != [""] else []
        if body.truncate is not False:
            prompts = [ids[:context] for ids in prompts]
        found = await embed(request, host, limits, prompts, dimensions=body.dimensions)
        return JsonResponse(
            {
                "model": body.model,
                "embeddings": [[float(value) for value in values] for values in found],
                "total_duration": time.perf_counter_ns() - start,
                "load_duration": 0,
                "prompt_eval_count": sum(map(len, prompts)),
            }
        )


async def answer_old_embed(request: Request, service: Service, body: OldEmbedRequest) -> Response:
    async with use_model(request, service, body.model) as (host, limits):
        prompts = list_prompts(host, body.prompt, whole=True) if body.prompt else []
        found = await embed(request, host, limits, prompts)
        values = [float(value) for value in found[0]] if found else []
        return JsonResponse({"embedding": values})


OPERATIONS = (
    Operation(
        "/api/chat",
        ChatRequest,
        "Answer a conversation (Ollama).",
        answer_with(prepare_talk),
        "chat",
    ),
    Operation(
        "/api/generate",
        GenerateRequest,
        "Answer a prompt (Ollama).",
        answer_with(prepare_text),
        "text_completion",
    ),
    Operation("/api/embed", EmbedRequest, "Embed texts (Ollama).", answer_embed, "embeddings"),
    Operation(
        "/api/embeddings", OldEmbedRequest, "Embed a text (Ollama).", answer_old_embed, "embeddings"
    ),
)
