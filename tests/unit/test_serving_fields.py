"""Fields of requests, names of this machine, and recorded conversations that are asked again."""

import typing
from typing import Any

import pytest
from pydantic import AliasChoices, TypeAdapter, ValidationError

from pi2.serving import chat, messages, ollama, openai_schema, responses
from pi2.serving.application import is_own_name, list_own_names
from pi2.serving.errors import ApiError
from pi2.serving.hosts import Replay
from pi2.serving.openai_schema import Tolerant

MESSAGE = {"role": "user", "content": "hi"}
BODIES: dict[type[Tolerant], dict[str, Any]] = {
    openai_schema.ChatRequest: {"model": "m", "messages": [MESSAGE]},
    openai_schema.CompletionRequest: {"model": "m", "prompt": "hi"},
    openai_schema.EmbeddingRequest: {"model": "m", "input": "hi"},
    responses.ResponsesRequest: {"model": "m", "input": "hi"},
    messages.MessagesRequest: {"model": "m", "messages": [MESSAGE], "max_tokens": 1},
    messages.CountRequest: {"model": "m", "messages": [MESSAGE]},
    ollama.ChatRequest: {"model": "m", "messages": [MESSAGE]},
    ollama.GenerateRequest: {"model": "m", "prompt": "hi"},
    ollama.Options: {},
}


def list_openai() -> list[tuple[type[Tolerant], Any]]:
    pytest.importorskip("openai", reason="needs OpenAI's client")
    from openai.types import completion_create_params, embedding_create_params, shared_params
    from openai.types.chat import chat_completion_stream_options_param as streams
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import (
        function_tool_param,
        response_create_params,
        response_text_config_param,
    )

    return [
        (openai_schema.ChatRequest, chats.CompletionCreateParamsBase),
        (openai_schema.CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (openai_schema.EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
        (responses.ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (openai_schema.StreamOptions, streams.ChatCompletionStreamOptionsParam),
        (openai_schema.FunctionTool, shared_params.FunctionDefinition),
        (openai_schema.Reasoning, shared_params.Reasoning),
        (responses.ResponseTool, function_tool_param.FunctionToolParam),
        (responses.TextSettings, response_text_config_param.ResponseTextConfigParam),
    ]


def list_anthropic() -> list[tuple[type[Tolerant], Any]]:
    pytest.importorskip("anthropic", reason="needs Anthropic's client")
    from anthropic.types import (
        MessageCountTokensParams,
        ToolChoiceToolParam,
        beta,
        message_create_params,
    )
    from anthropic.types.beta import message_create_params as beta_create_params

    return [
        (messages.MessagesRequest, message_create_params.MessageCreateParamsBase),
        (messages.MessagesRequest, beta_create_params.MessageCreateParamsBase),
        (messages.CountRequest, MessageCountTokensParams),
        (messages.CountRequest, beta.MessageCountTokensParams),
        (messages.Choice, ToolChoiceToolParam),
        (messages.OutputConfig, beta.BetaOutputConfigParam),
        (messages.Thinking, beta.BetaThinkingConfigEnabledParam),
        (messages.Tool, beta.BetaToolParam),
    ]


def list_ollama() -> list[tuple[type[Tolerant], Any]]:
    kinds = pytest.importorskip("ollama", reason="needs Ollama's client")._types
    return [
        (ollama.ChatRequest, kinds.ChatRequest),
        (ollama.GenerateRequest, kinds.GenerateRequest),
        (ollama.Options, kinds.Options),
        (ollama.Message, kinds.Message),
        (openai_schema.Tool, kinds.Tool),
    ]


def list_fates(kind: type[Tolerant]) -> dict[str, str]:
    """What becomes of each field of a body or of its part: ``honoured``, ``ignored`` (it changes no
    answer), or ``refused`` unless it is harmless."""
    found = dict.fromkeys(kind.fields.ignored, "ignored") | dict.fromkeys(
        kind.fields.refused, "refused"
    )
    for name, own in kind.model_fields.items():
        alias = own.validation_alias or own.alias
        names = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
        found |= {str(choice): "honoured" for choice in names}
    return found


@pytest.mark.parametrize("listed", [list_openai, list_anthropic, list_ollama])
def test_every_field_of_a_client_is_honoured_ignored_or_refused(listed: Any) -> None:
    for own, theirs in listed():
        missing = set(typing.get_type_hints(theirs)) - set(list_fates(own))
        assert not missing, f"{own.__name__}: use, ignore or refuse {sorted(missing)}"


DRAWING: set[str] = {
    *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "repeat_penalty", "repeat_last_n", "top_k", "min_p", "typical_p", "tfs_z"),
    *("mirostat", "n", "max_tokens", "max_completion_tokens", "num_predict", "stop_sequences"),
    *("max_output_tokens", "response_format", "format", "output_format", "tools", "tool_choice"),
    *("system", "instructions", "suffix", "verbosity", "reasoning_effort", "think", "thinking"),
    *("penalize_nl", "penalize_newline", "reasoning_format", "t_max_predict_ms", "grammar"),
    *("xtc_probability", "dry_multiplier", "dynatemp_range", "top_n_sigma", "min_tokens"),
}
"""Fields that change answers."""


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_no_field_that_changes_answers_is_ignored(kind: type[Tolerant]) -> None:
    if kind is not messages.CountRequest:  # counts are of the conversation, for any answer
        fates = list_fates(kind)
        assert not [name for name in DRAWING if fates.get(name) == "ignored"]


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_what_would_change_the_answer_is_refused_by_its_name(kind: type[Tolerant]) -> None:
    body = BODIES[kind]
    assert not set(kind.fields.ignored) & set(kind.fields.refused)
    honoured = {name for name, fate in list_fates(kind).items() if fate == "honoured"}
    assert not honoured & (set(kind.fields.ignored) | set(kind.fields.refused))
    kind.model_validate({**body, **{key: {"any": "thing"} for key in kind.fields.ignored}})
    for name, harmless in kind.fields.refused.items():
        for value in (None, *harmless):
            kind.model_validate({**body, name: value})
        with pytest.raises(ApiError) as refused:
            kind.model_validate({**body, name: "surprise"})
        assert refused.value.status == 400 and str(refused.value.param).endswith(name)


@pytest.mark.parametrize("kind", [kind for kind in BODIES if kind.__module__ != ollama.__name__])
def test_what_nobody_knows_is_refused(kind: type[Tolerant]) -> None:
    with pytest.raises(ValidationError, match="surprise"):
        kind.model_validate({**BODIES[kind], "surprise": 1})


def test_how_much_is_said_is_told_to_the_template() -> None:
    body = {**BODIES[openai_schema.ChatRequest], "verbosity": "low"}
    asked = chat.read_conversation(openai_schema.ChatRequest.model_validate(body))
    other = {**BODIES[responses.ResponsesRequest], "text": {"verbosity": "low"}}
    responded = responses.read_conversation(responses.ResponsesRequest.model_validate(other))
    assert asked.variables["verbosity"] == responded.variables["verbosity"] == "low"


def test_tools_that_run_elsewhere_are_left_out() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    own = {"type": "function", "function": function}
    for kind in ("custom", "web_search", "mcp", "namespace"):
        chat = openai_schema.ChatRequest.model_validate(
            {**BODIES[openai_schema.ChatRequest], "tools": [{"type": kind, kind: {}}, own]}
        )
        assert [tool.function.name for tool in chat.tools or ()] == ["f"]
        response = responses.ResponsesRequest.model_validate(
            {"model": "m", "input": "", "tools": [{"type": kind}, {"type": "function", **function}]}
        )
        assert [tool.name for tool in response.tools or ()] == ["f"]
    for kind in (
        "web_search_20250305",
        "code_execution_20250825",
        "computer_20251124",
        "mcp_toolset",
    ):
        message = messages.CountRequest.model_validate(
            {
                **BODIES[messages.CountRequest],
                "tools": [{"type": kind, "name": kind}, {"name": "f", "input_schema": {}}],
            }
        )
        assert [tool.name for tool in message.tools or ()] == ["f"]


def test_the_interface_describes_every_body() -> None:
    from pi2.serving.openapi import OPERATIONS, describe_interface

    found = describe_interface()
    for operation in OPERATIONS:
        assert operation.path in found["paths"]
        TypeAdapter(operation.body)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "[::1]", "::1"]
    + ["127.0.0.2:8000", "chat.example", "chat.example:8443"],
)
def test_a_server_answers_to_its_own_names(host: str) -> None:
    names = list_own_names("127.0.0.2", has_keys=False, origins=["https://chat.example:8443"])
    assert names is not None and is_own_name(host.encode(), names)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
    + ["", ":8000", "127.0.0.2", "evil@localhost", "\xff"],
)
def test_a_server_answers_to_no_other_name(host: str) -> None:
    names = list_own_names("localhost", has_keys=False)
    assert names is not None and not is_own_name(host.encode("latin-1"), names)


@pytest.mark.parametrize(
    ("address", "has_keys", "origins"),
    [
        ("0.0.0.0", False, []), ("::", False, []), ("192.0.2.1", False, []),
        ("models.example", False, []), ("127.0.0.1", True, []), ("127.0.0.1", False, ["*"]),
    ],
)  # fmt: skip
def test_names_are_free_where_others_reach_the_server_or_keys_guard_it(
    address: str, has_keys: bool, origins: list[str]
) -> None:
    assert list_own_names(address, has_keys=has_keys, origins=origins) is None


def test_a_conversation_that_goes_on_has_the_tokens_that_were_sampled() -> None:
    def encode(text: str) -> list[int]:
        return [ord(sign) for sign in text]

    replay = Replay()
    assert replay.encode("ab", encode) == [97, 98]
    # The model has drawn one token for both letters.
    replay.note("ab", [1])
    replay.note("abcd", [1, 2])
    assert replay.encode("abc", encode) == [1, 99]
    assert replay.encode("abcde", encode) == [1, 2, 101]
    assert replay.encode("abcd", encode) == [1, 2]
    assert replay.encode("xab", encode) == [120, 97, 98]
    for number in range(64):
        replay.note(f"other {number}", [number])
    assert replay.encode("abc", encode) == [97, 98, 99], "only the latest are remembered"


def test_calls_are_remembered_by_what_they_call() -> None:
    replay = Replay()
    one, two = {"b": 1, "a": [2]}, {"a": [2], "b": 2}
    replay.note_calls("well\n", [("get", one)], "well\n<tool_call>{...}")
    assert replay.recall([("well", [("get", {"a": [2], "b": 1})])]) == ["well\n<tool_call>{...}"]
    assert replay.recall([("well", [("get", two)]), ("", [("get", one)])]) == [None, None]
    replay.note_calls("well", [("get", one)], "well <tool_call>{ ...}")
    asked = ("well", [("get", one)])
    assert replay.recall([asked, asked]) == ["well\n<tool_call>{...}", "well <tool_call>{ ...}"]
    assert replay.recall([asked]) == ["well <tool_call>{ ...}"]
    for number in range(1024):
        replay.note_calls("", [("get", number)], "x")
    assert replay.recall([asked]) == [None]
