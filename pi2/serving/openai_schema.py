"""Bodies of OpenAI's requests, as far as they are understood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pi2.serving.errors import ApiError, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What becomes of an interface's fields that its schema does not have."""

    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Fields that would change the answer, with harmless values; null and empty ones are
    harmless."""

    def leave_out(self, values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
        """The ``values`` of other fields; ApiError 400 for one that would change the answer."""
        kept = {}
        for name, value in values.items():
            if name in self.refused:
                if value not in (None, "", [], {}) and value not in self.refused[name]:
                    own = place + name
                    message = f"'{own}' is not supported and would change the answer: leave it out."
                    raise ApiError(400, message, param=own, code="unsupported_parameter")
            elif name not in self.ignored:
                kept[name] = value
        return kept


def find_fields(interface: str) -> Fields:
    """What ``fields.toml`` says of an interface."""
    table = read_table()
    own = table["interfaces"][interface]
    groups = (table["groups"][name] for name in own.get("with", ()))
    samplers = table["samplers"] if own.get("has_samplers") else {}
    return Fields(
        ignored=frozenset(own.get("ignored", ())).union(*groups),
        refused={**samplers, **own.get("refused", {})},
    )


class Tolerant(BaseModel):
    """A part of a body: keys that are not known are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    fields: ClassVar[Fields] = Fields()
    place: ClassVar[str] = ""
    """What fields of this part are called after."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        return cls.fields.leave_out(values, cls.place) if isinstance(values, dict) else values


class Strict(Tolerant):
    """A body: keys that are not known are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def keep_tools(kind: str) -> BeforeValidator:
    """Leaves out tools of other kinds than ``kind``: servers that have them run them."""

    def keep(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kinds = (None, kind)
        return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in kinds]

    return BeforeValidator(keep)


Text = Annotated[str, Field(max_length=1 << 24)]
Stop = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
)
LogitBias = dict[str, Annotated[float, Field(ge=-100, le=100)]]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""-1 draws one, as null does."""
Count = Annotated[int, Field(ge=-1)]
"""Most tokens of an answer; -1 stands for as many as there is room for."""
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
"""0 and -1 keep all tokens."""


class Body(Strict):
    """A request's body."""

    model: Text
    """Name of a served plan."""


class StreamOptions(Tolerant):
    """Additional parts of a stream."""

    fields = find_fields("stream-options")

    include_usage: bool | None = None


class Sampled(Body):
    """How tokens are drawn; missing values are the plan's."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    """Not OpenAI's."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Not OpenAI's."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = Field(
        default=None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    """Not OpenAI's."""
    penalty_window: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, validation_alias="repeat_last_n"
    )
    """Not OpenAI's: 0 turns all penalties off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    """Not OpenAI's, like the others of DRY: llama.cpp's."""
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: list[Annotated[str, Field(min_length=1)]] | None = None
    end_repeats: bool | None = None
    """Not OpenAI's: false lets answers go on that only repeat."""
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class FunctionTool(Tolerant):
    """A function that the model may call."""

    fields = find_fields("function")

    name: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Tolerant):
    type: Literal["function"] | None = "function"
    function: FunctionTool


class CalledFunction(Tolerant):
    """A call in an earlier message."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(Tolerant):
    """A call in an earlier message, with its identity."""

    id: str | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message; unknown fields are tolerated."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )


class Reasoning(Tolerant):
    """How much the model reasons."""

    fields = find_fields("reasoning")

    effort: str | None = None


class Thinking(Tolerant):
    """Whether the model reasons."""

    type: str | None = None


class ChatRequest(Sampled):
    """``/v1/chat/completions``."""

    fields = find_fields("chat")

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool] | None, keep_tools("function")] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    """For the template, as the effort is."""
    reasoning: Reasoning | None = None
    """Not OpenAI's, as are the five that follow."""
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """What else the template reads."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs'")
        return self


class CompletionRequest(Sampled):
    """``/v1/completions``."""

    fields = find_fields("completions")

    prompt: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=128)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=128)]
    )
    suffix: Text | None = None
    """What follows the text that is filled in."""
    max_tokens: Count | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=20)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = None
    ignore_eos: bool | None = None
    """Not OpenAI's."""
    return_token_ids: bool | None = None
    """Not OpenAI's: choices have ``token_ids``."""

    @model_validator(mode="after")
    def _check_best(self) -> CompletionRequest:
        if self.best_of is not None and (self.stream or self.best_of < (self.n or 1)):
            raise ValueError("'best_of' must be at least 'n', and does not go with 'stream'")
        return self


class EmbeddingRequest(Body):
    """``/v1/embeddings``."""

    fields = find_fields("embeddings")

    input: (
        Text
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=2048)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None
    """Not OpenAI's: of all tokens, or of the last one; by default what the model says."""


class TokenizeRequest(Strict):
    """``/tokenize``: a text, or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """``/detokenize``: token ids."""

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
