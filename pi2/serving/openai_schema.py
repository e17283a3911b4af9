"""Bodies of OpenAI's requests, as far as they are understood.

An unknown key at the top is refused, as OpenAI's server does; what is unknown inside messages and
tools is tolerated, because clients send back what other servers have given them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Stop = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
LogitBias = dict[str, Annotated[float, Field(ge=-100, le=100)]]
Text = Annotated[str, Field(max_length=1 << 24)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class Body(BaseModel):
    """A request's body: keys that are not known are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: Text
    """Name of a served plan."""
    user: Any = None
    """Accepted and ignored, as are the five that follow."""
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None


class Tolerant(BaseModel):
    """A part of a body: keys that are not known are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class Sampled(Body):
    """How tokens are drawn; what is not given is the plan's."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Not OpenAI's."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Not OpenAI's."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Not OpenAI's."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Annotated[str, Field(min_length=1)] | Stop | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' goes with 'stream' alone")
        return self


class StreamOptions(Tolerant):
    """What a stream tells besides."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class FunctionTool(Tolerant):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Tolerant):
    """A tool: functions are understood."""

    type: Literal["function"]
    function: FunctionTool


class JsonSchema(Tolerant):
    """A schema and its name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Tolerant):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Tolerant):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Tolerant):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class NamedFunction(Tolerant):
    """A function's name."""

    name: str


class NamedTool(Tolerant):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Tolerant):
    """A call in an earlier message."""

    name: str
    arguments: str = "{}"


class CalledTool(Tolerant):
    """A call in an earlier message, with its identity."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message; what is unknown in it is tolerated."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs a tool_call_id")
        return self


class ChatRequest(Sampled):
    """``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's: what else the template reads."""

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' goes with 'logprobs' alone")
        if isinstance(self.tool_choice, NamedTool) and not self.tools:
            raise ValueError("'tool_choice' goes with 'tools' alone")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("'tool_choice' goes with 'tools' alone")
        return self


class CompletionRequest(Sampled):
    """``/v1/completions``."""

    prompt: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=128)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=128)]
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = None
    suffix: None = None
    ignore_eos: bool | None = None
    """Not OpenAI's."""
    return_token_ids: bool | None = None
    """Not OpenAI's: choices have ``token_ids``."""

    @field_validator("logprobs", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _check_best(self) -> CompletionRequest:
        if self.best_of is not None and (self.stream or self.best_of < (self.n or 1)):
            raise ValueError("'best_of' must be at least 'n', and does not go with 'stream'")
        return self


class EmbeddingRequest(Body):
    """``/v1/embeddings``."""

    input: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=2048)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    """Not OpenAI's: of all tokens, or of the last one; by default what the model says."""


class TokenizeRequest(BaseModel):
    """``/tokenize``: a text, or a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(BaseModel):
    """``/detokenize``: token ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


Sampled.model_rebuild()
