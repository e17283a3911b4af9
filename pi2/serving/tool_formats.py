"""How families of models write calls of tools, and how that is read.

The family is known by its chat template: the template says how earlier calls are written, and the
model was trained to write its own in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it where that is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written."""

    name: str
    begin: tuple[str, ...]
    """What a call, or a list of them, begins with."""
    end: str | None
    """What it ends with; None where it ends with the answer."""
    parse: Callable[[str], list[ToolCall]]
    """Reads what is between; empty where it is no call."""
    bare: bool = False
    """Whether an answer that begins with ``{`` is a call, too."""
    write: tuple[str, str, str, str] = ('<tool_call>\n{"name": ', ', "arguments": ', "}", "")
    """What to write before the name (a JSON string), before and after the arguments, and the end:
    for answers that must be calls."""

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, names and arguments as JSON values, as a model would write them."""
        before, middle, after, between = self.write
        return between.join(
            f"{before}{name if self.name == 'fenced' else _dump(name)}{middle}"
            f"{_dump(arguments)}{after}"
            for name, arguments in calls
        )


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _find_raw_value(text: str, key: str) -> str | None:
    """The text of the object that stands for ``key``, as it was written."""
    found = re.search(rf'"{key}"\s*:\s*', text)
    if found is None:
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text, found.end())
    except ValueError:
        return None
    return text[found.end() : end]


def read_call(value: Any, text: str | None = None) -> ToolCall | None:
    """A call out of an object with its name and arguments; ``text`` is what was read as it."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    key = "arguments" if "arguments" in value else "parameters"
    arguments = value.get(key, {})
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return ToolCall(name, arguments or "{}")
    raw = None if text is None else _find_raw_value(text, key)
    if raw is not None and _is_same(raw, arguments):
        return ToolCall(name, raw)
    return ToolCall(name, _dump(arguments))


def _is_same(raw: str, value: Any) -> bool:
    try:
        return bool(json.loads(raw) == value)
    except ValueError:
        return False


def read_json_calls(text: str) -> list[ToolCall]:
    """Calls out of an object, a list of objects, or objects one after the other."""
    calls: list[ToolCall] = []
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
        if at == len(text):
            return calls
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        items = value if isinstance(value, list) else [value]
        whole = text[at:end] if not isinstance(value, list) else None
        found = [read_call(item, whole) for item in items]
        if any(call is None for call in found):
            return []
        calls += [call for call in found if call is not None]
        at = end


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_value(text: str) -> Any:
    """A parameter: JSON where it is some other than a text, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def read_tagged_calls(text: str) -> list[ToolCall]:
    """Calls between ``<tool_call>`` and ``</tool_call>``: JSON, or functions with parameters."""
    if "<function=" not in text:
        return read_json_calls(text)
    calls = []
    for name, body in _FUNCTION.findall(text):
        values = {key.strip(): _read_value(value) for key, value in _PARAMETER.findall(body)}
        calls.append(ToolCall(name.strip(), _dump(values)))
    return calls


def read_named_calls(text: str) -> list[ToolCall]:
    """``[{...}]``, or ``name[ARGS]{...}`` and ``name{...}``."""
    stripped = text.strip()
    if stripped.startswith(("[", "{")):
        return read_json_calls(stripped)
    calls = []
    for part in filter(None, stripped.split("[TOOL_CALLS]")):
        found = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*", part)
        if found is None:
            return []
        try:
            _, end = json.JSONDecoder().raw_decode(part, found.end())
        except (ValueError, RecursionError):
            return []
        calls.append(ToolCall(found[1], part[found.end() : end]))
    return calls


_FENCED = re.compile("<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCE = re.compile(r"([^\n]+)\n```json\n(.*?)\n?```", re.DOTALL)


def read_fenced_calls(text: str) -> list[ToolCall]:
    """Calls between marks of their own: a kind, the name and arguments in a fence; or the name and
    arguments."""
    calls = []
    for body in _FENCED.findall(text):
        head, _, tail = body.partition("<｜tool▁sep｜>")
        fenced = _FENCE.match(tail)
        name, arguments = (head, tail) if fenced is None else fenced.groups()
        calls.append(ToolCall(name.strip(), arguments.strip()))
    return calls


TAGGED = ToolFormat(
    name="tagged",
    begin=("<tool_call>",),
    end="</tool_call>",
    parse=read_tagged_calls,
    write=('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n"),
)
BRACKETS = ToolFormat(
    name="brackets",
    begin=("[TOOL_CALLS]",),
    end=None,
    parse=read_named_calls,
    write=('[TOOL_CALLS][{"name": ', ', "arguments": ', "}]", ""),
)
BARE = ToolFormat(
    name="bare",
    begin=("<|python_tag|>",),
    end=None,
    parse=read_json_calls,
    bare=True,
    write=('{"name": ', ', "parameters": ', "}", "; "),
)
BARS = ToolFormat(
    name="bars",
    begin=("<|tool_call|>", "<tool_call|>"),
    end="<|/tool_call|>",
    parse=read_json_calls,
    write=('<|tool_call|>[{"name": ', ', "arguments": ', "}]<|/tool_call|>", ""),
)
FENCED = ToolFormat(
    name="fenced",
    begin=("<｜tool▁calls▁begin｜>",),
    end="<｜tool▁calls▁end｜>",
    parse=read_fenced_calls,
    write=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
)


def find_tool_format(template: str) -> ToolFormat:
    """The format of the family that has this chat template; ``TAGGED`` if it says nothing."""
    if "[TOOL_CALLS]" in template:
        return BRACKETS
    if "tool▁calls▁begin" in template:
        return FENCED
    if "<|tool_call|>" in template:
        return BARS
    if "<tool_call>" in template:
        return TAGGED
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return BARE
    return TAGGED


def knows_tools(template: str) -> bool:
    """Whether a chat template tells the model of tools."""
    return re.search(r"\btools\b", template) is not None


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What to tell a model of tools whose chat template does not."""
    listed = "\n".join(_dump(tool) for tool in tools)
    return (
        "You can call functions. Their signatures as JSON:\n"
        f"{listed}\n"
        "To call one, write nothing but\n<tool_call>\n"
        '{"name": <name>, "arguments": <arguments as JSON object>}\n</tool_call>'
    )
