"""A conversation as chat templates read it, whatever interface it came through."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pi2.serving.errors import ApiError
from pi2.serving.host import Host
from pi2.serving.tool_formats import describe_tools

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What is said, and which tools there are."""

    messages: Sequence[Mapping[str, Any]]
    """With texts as contents; calls of tools have objects as arguments."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions: ``{"name", "description", "parameters"}``."""
    tool_choice: ToolChoice = "auto"
    parallel_calls: bool = True
    named_tool: str | None = None
    """The tool that must be called."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else the template reads."""
    json_schema: Mapping[str, Any] | None = None
    """What the answer must be, if it must be JSON; `ANY_OBJECT` lets every object be."""


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def join_text(content: Any, *, param: str = "messages", kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content: a text, or parts of the ``kinds``; ApiError 400 for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise ApiError(
                400,
                f"Content of type {kind!r} is not supported: this model reads text.",
                param=param,
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def read_arguments(arguments: Any) -> Any:
    """Arguments of a call as an object, where they are one."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def make_call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an earlier answer, as templates read it."""
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": read_arguments(arguments)},
    }


def list_calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(str(item["name"]), item["arguments"]) for item in functions]


def render_prompt(
    host: Host, conversation: Conversation, written: Mapping[int, str] | None = None
) -> str:
    """The prompt that the model's template makes of a conversation.  UserError P608 or P609.

    ``written``: what stands for messages with calls, by their number, instead of what the template
    makes of the calls."""
    facts = host.find_chat_facts()
    messages = [dict(message) for message in conversation.messages]
    for number, message in enumerate(messages):
        if written is not None and number in written:
            messages[number] = {"role": message["role"], "content": written[number]}
        elif message.get("tool_calls") and not facts.knows_tools:
            # Such a template would leave them out.
            text = facts.tools.write_calls(list_calls(message))
            messages[number] = {
                "role": message["role"],
                "content": f"{message.get('content') or ''}{text}",
            }
    variables = dict(conversation.variables)
    if conversation.tools and conversation.tool_choice != "none":
        wrapped = [{"type": "function", "function": dict(tool)} for tool in conversation.tools]
        if facts.knows_tools:
            variables["tools"] = wrapped
        else:
            told = describe_tools(wrapped)
            if messages and messages[0].get("role") == "system":
                messages[0]["content"] = f"{messages[0]['content']}\n\n{told}"
            else:
                messages.insert(0, {"role": "system", "content": told})
    return host.model.render_chat(messages, variables=variables)
