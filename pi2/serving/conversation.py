"""A conversation as chat templates read it, from any interface."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pi2.diagnostics import UserError
from pi2.serving.answer_reader import describe_tools
from pi2.serving.call_patterns import CallForm
from pi2.serving.errors import ApiError
from pi2.serving.hosts import Host

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: Sequence[Mapping[str, Any]]
    """With texts as contents; calls of tools have objects as arguments."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions: ``{"name", "description", "parameters"}``."""
    tool_choice: ToolChoice = "auto"
    parallel_calls: bool | None = None
    """Whether an answer may have several calls; None: it may, but a forced one has one."""
    named_tool: str | None = None
    """The tool that must be called."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What else the template reads."""
    json_schema: Mapping[str, Any] | None = None
    """What the answer must be, if it must be JSON; `ANY_OBJECT` lets every object be."""
    continues: bool | None = None
    """Whether the answer continues the last message; by default an assistant's without calls."""

    def __post_init__(self) -> None:
        if self.named_tool is not None:
            if all(tool.get("name") != self.named_tool for tool in self.tools):
                known = ", ".join(str(tool.get("name")) for tool in self.tools) or "none"
                message = f"This model can call no tool '{self.named_tool}'; there are: {known}."
                raise ApiError(400, message, param="tool_choice")
        elif self.tool_choice == "required" and not self.tools:
            message = "A call is required, and there is no tool that this model can call."
            raise ApiError(400, message, param="tool_choice")

    @property
    def is_open(self) -> bool:
        last = self.messages[-1] if self.messages else {}
        can = last.get("role") == "assistant" and not last.get("tool_calls")
        if self.continues and not can:
            message = "The last message is not the assistant's: nothing can be continued."
            raise ApiError(400, message, param="continue_final_message")
        return can if self.continues is None else self.continues

    @property
    def may_reason(self) -> bool:
        return self.variables.get("enable_thinking") is True


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_OPEN = "\ue000\ue001"
"""Stands at the end of a message that is continued, until the template is rendered."""


def read_choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """``tool_choice`` of a `Conversation` with ``tools``; ApiError 400 for an invalid one."""
    stated: Mapping[str, Any] = choice if isinstance(choice, Mapping) else {}
    mode, kind = choice if isinstance(choice, str) else "auto", stated.get("type")
    wrapped = stated.get(kind) if isinstance(kind, str) else None
    inner = wrapped if isinstance(wrapped, Mapping) else stated
    if kind == "allowed_tools":
        listed, mode = inner.get("tools"), inner.get("mode", "auto")
        names = _list_names(listed if isinstance(listed, list) else [])
        tools = [tool for tool in tools if tool.get("name") in names]
    elif kind is not None:
        # A tool that was left out has the name of its kind.
        return {"tools": tools, "named_tool": str(inner.get("name") or kind)}
    if mode not in ("auto", "none", "required"):
        raise ApiError(400, f"{mode!r} is no tool_choice.", param="tool_choice")
    return {"tools": tools, "tool_choice": mode}


def _list_names(tools: Sequence[Any]) -> Collection[Any]:
    found = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return [item.get("name") for item in found if isinstance(item, Mapping)]


def read_format(
    value: Mapping[str, Any] | None, *, param: str = "response_format"
) -> Mapping[str, Any] | None:
    """The schema of a JSON answer that ``value`` asks for; None if any text will do."""
    kind = "text" if value is None else value.get("type")
    if value is None or kind in ("text", None):
        return None
    wrapped = value.get("json_schema")
    schema = (wrapped if isinstance(wrapped, Mapping) else value).get("schema")
    if kind not in ("json_object", "json_schema"):
        raise ApiError(400, f"The format {kind!r} is not supported.", param=f"{param}.type")
    if schema is not None and not isinstance(schema, Mapping):
        raise ApiError(400, "A schema is a JSON object.", param=f"{param}.schema")
    return schema or ANY_OBJECT


def set_effort(variables: dict[str, Any], effort: str | None) -> None:
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        variables.setdefault("enable_thinking", effort not in ("none", "minimal"))


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
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def read_object(arguments: str) -> dict[str, Any]:
    found = read_arguments(arguments)
    return found if isinstance(found, dict) else {}


def make_call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": read_arguments(arguments or {})},
    }


def list_calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(str(item["name"]), item["arguments"]) for item in functions]


def name_calls(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    found = []
    for message in map(dict, messages):
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                name = str(call["function"]["name"])
                identity = form.write_identity(name, len(names))
                names[str(call.get("id"))] = identity
                calls.append({**call, "id": identity})
            message["tool_calls"] = calls
        if message.get("tool_call_id") in names:
            message["tool_call_id"] = names[str(message["tool_call_id"])]
        found.append(message)
    return found


def render_prompt(
    host: Host, conversation: Conversation, written: Mapping[int, str] | None = None
) -> str:
    """The model's prompt; UserError P608, P609.  ``written`` replaces numbered messages."""
    facts = host.find_chat_facts()
    messages = [dict(message) for message in conversation.messages]
    for number, message in enumerate(messages):
        if written is not None and number in written:
            messages[number] = {"role": message["role"], "content": written[number]}
    variables = dict(conversation.variables)
    if conversation.tools and conversation.tool_choice != "none":
        wrapped = [{"type": "function", "function": dict(tool)} for tool in conversation.tools]
        if facts.knows_tools:
            variables["tools"] = wrapped
        else:
            told = describe_tools(facts.format, wrapped)
            if messages and messages[0].get("role") == "system":
                messages[0]["content"] = f"{messages[0]['content']}\n\n{told}"
            else:
                messages.insert(0, {"role": "system", "content": told})
    form = facts.format.calls[0]
    if form.identity:
        messages = name_calls(messages, form)
    render = partial(host.model.render_chat, variables=variables, write_calls=form.write)
    if not conversation.is_open:
        return render(messages)
    last = messages[-1]
    said = str(last.get("content") or "")
    opened = [*messages[:-1], {**last, "content": said + _OPEN}]
    try:
        whole = render(opened, add_generation_prompt=False)
    except UserError:
        whole = ""
    if _OPEN in whole:
        return whole[: whole.rindex(_OPEN)]
    # Templates may leave an answer at the end out, or refuse it.
    return render(messages[:-1]) + said
