"""The shapes in which chat templates want messages, found out once for each template."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pi2.diagnostics import UserError

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``, and other fields that a template reads."""
Render = Callable[[Sequence[Message]], str]
WriteCalls = Callable[[Sequence[tuple[str, Any]]], str]
"""Writes calls, names and arguments as JSON values, as a model does."""
_ID_SIGNS = 9
_WORD, _NAME, _KEY, _VALUE = "Wordone", "name_two", "key_three", "value four"
_RESULT, _SAID = "Resultfive", "Saidsix"
_ID = "call_0123456789abcdef01234567"
_CALL = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}


def _describe_probe(said: str) -> list[Message]:
    return [
        {"role": "user", "content": _WORD},
        {"role": "assistant", "content": said, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT},
    ]


@dataclass(frozen=True, slots=True)
class Shape:
    """How messages are given to a template."""

    writes_arguments: bool = False
    """Arguments are JSON texts, not objects."""
    has_no_content: bool = False
    """A message with calls has no content, not even an empty one; its text comes before it."""
    shortens_ids: bool = False
    """Ids of calls have nine letters and digits."""
    has_parts: bool = False
    """Contents are lists of parts."""
    joins_thoughts: bool = False
    """Text next to a call is part of the reasoning before it."""
    tells_results: bool = False
    """Results of tools are messages of the user's."""
    joins_systems: bool = False
    """System messages at the beginning are one."""
    tells_later_systems: bool = False
    """System messages after those at the beginning are the user's."""
    tells_systems: bool = False
    """All of them are the user's."""
    takes_turns: bool = False
    """Neighbours of the same role are one message."""

    def apply(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for message in self._place_systems(messages):
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [self._shape_call(call) for call in calls]
                thoughts = message.get("thinking")
                if self.joins_thoughts and thoughts and message.get("content"):
                    joined = f"{thoughts}\n\n{message['content']}"
                    message |= {key: joined for key in _THOUGHTS if key in message}
                    message["content"] = ""
                if self.has_no_content:
                    if message.get("content"):
                        found.append({**message, "tool_calls": None})
                        found[-1].pop("tool_calls")
                    message["content"] = None
            if self.shortens_ids and isinstance(message.get("tool_call_id"), str):
                message["tool_call_id"] = shorten_id(message["tool_call_id"])
            if self.tells_results and message.get("role") == "tool":
                text = f"<tool_response>\n{message.get('content')}\n</tool_response>"
                if found and found[-1].get("is_result"):
                    found[-1]["content"] += f"\n{text}"
                    continue
                message = {"role": "user", "content": text, "is_result": True}
            found.append(message)
        if self.takes_turns:
            found = _join_neighbours(found, ("user", "assistant"))
        for message in found:
            message.pop("is_result", None)
            if self.has_parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        return found

    def _place_systems(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        found = [dict(message) for message in messages]
        first = next(
            (n for n, item in enumerate(found) if item.get("role") != "system"), len(found)
        )
        for number, message in enumerate(found):
            is_told = self.tells_systems or (self.tells_later_systems and number >= first)
            if is_told and message.get("role") == "system":
                message["role"] = "user"
        return _join_neighbours(found, ("system",)) if self.joins_systems else found

    def _shape_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        shaped = dict(call)
        if isinstance(call.get("function"), Mapping):
            function = dict(call["function"])
            arguments = function.get("arguments")
            if self.writes_arguments and not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            elif not self.writes_arguments and isinstance(arguments, str):
                function["arguments"] = _read_object(arguments)
            shaped["function"] = function
        if self.shortens_ids and isinstance(call.get("id"), str):
            shaped["id"] = shorten_id(call["id"])
        return shaped


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that templates have for the reasoning before an answer."""


def _join_neighbours(messages: Sequence[Message], roles: Sequence[str]) -> list[dict[str, Any]]:
    """The messages; neighbours of one of ``roles`` are one, with all that both have."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        if message.get("role") not in roles or message["role"] != last.get("role"):
            found.append(dict(message))
            continue
        calls = [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
        last |= {
            key: _join_contents(last.get(key), message.get(key))
            for key in ("content", *_THOUGHTS)
            if key in last or key in message
        }
        last |= {"tool_calls": calls} if calls else {}
    return found


def _join_contents(one: Any, other: Any) -> Any:
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    both = [
        [{"type": "text", "text": part}] if isinstance(part, str) else part for part in (one, other)
    ]
    return [*both[0], *both[1]]


def _read_object(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def shorten_id(identity: str) -> str:
    """Nine letters and digits for an id, always the same."""
    if len(identity) == _ID_SIGNS and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:_ID_SIGNS]


def complete_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with what templates look for: one role of systems, thoughts by each of their
    names, and the names of the tools whose results there are."""
    found = [dict(message) for message in messages]
    names: dict[str, str] = {}
    waiting: list[tuple[str, str]] = []
    for message in found:
        if message.get("role") == "developer":
            message["role"] = "system"
        thoughts = next((message[key] for key in _THOUGHTS if message.get(key)), None)
        if thoughts is not None:
            message |= {key: message.get(key) or thoughts for key in _THOUGHTS}
        if message.get("tool_calls"):
            waiting = [_name_call(call) for call in message["tool_calls"]]
            names |= dict(waiting)
        elif message.get("role") == "tool":
            identity = message.get("tool_call_id")
            if not identity and waiting:
                identity, _ = waiting[0]
                message["tool_call_id"] = identity
            waiting = [item for item in waiting if item[0] != identity]
            if not message.get("name") and identity in names:
                message["name"] = names[str(identity)]
    return found


def _name_call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else call.get("name")
    return str(call.get("id")), str(name)


class ShapedTemplate:
    """Renders messages in the shape that a template wants, which it remembers."""

    def __init__(self, source: str) -> None:
        self._shape = Shape()
        self._knows_calls = "tool_calls" in source
        self._seen: set[str] = set()
        """Roles whose messages the template has rendered."""
        self._has_seen_calls = not self._knows_calls

    def render(
        self, messages: Sequence[Message], render: Render, write_calls: WriteCalls | None = None
    ) -> str:
        """The template's text for messages; ``write_calls`` writes calls that it would leave out.
        UserError P608."""
        given = complete_messages(messages)
        if not self._has_seen_calls and any(message.get("tool_calls") for message in given):
            self._has_seen_calls = True
            self._try_calls(render)
        if not self._knows_calls and write_calls is not None:
            given = [_write_calls(message, write_calls) for message in given]
        first: UserError | None = None
        for shape in self._list_shapes(given):
            try:
                text = render(shape.apply(given))
            except UserError as error:
                first = first or error
                continue
            return self._check_text(given, shape, text, render)
        assert first is not None
        raise first

    def _list_shapes(self, messages: Sequence[Message]) -> Iterator[Shape]:
        own = self._shape
        others = (
            replace(own, writes_arguments=not own.writes_arguments),
            replace(own, has_no_content=not own.has_no_content),
            replace(own, shortens_ids=not own.shortens_ids),
            replace(own, has_parts=not own.has_parts),
        )
        tried: list[list[dict[str, Any]]] = []
        for one in (
            own,
            replace(own, joins_thoughts=True),
            *others,
            replace(own, tells_results=True),
        ):
            for shape in _list_orders(one):
                shaped = shape.apply(messages)
                if shaped not in tried:
                    tried.append(shaped)
                    yield shape

    def _check_text(
        self, messages: Sequence[Message], shape: Shape, text: str, render: Render
    ) -> str:
        """The prompt, which must contain the last message of the user and of a tool: some templates
        drop content that is no list of parts, or roles that they do not know."""
        for role, other in (
            ("user", replace(shape, has_parts=not shape.has_parts)),
            ("tool", replace(shape, tells_results=True)),
        ):
            contents = (item.get("content") for item in messages if item.get("role") == role)
            said = [content.strip() for content in contents if isinstance(content, str)]
            if role in self._seen or not said or not said[-1]:
                continue
            self._seen.add(role)
            # Templates may write it as JSON.
            word = json.dumps(said[-1], ensure_ascii=False)[1:-1]
            if said[-1] in text or word in text:
                continue
            try:
                tried = render(other.apply(messages))
            except UserError:
                continue
            if said[-1] in tried:
                self._shape = shape = other
                text = tried
        return self._check_systems(messages, shape, text, render)

    def _check_systems(
        self, messages: Sequence[Message], shape: Shape, text: str, render: Render
    ) -> str:
        """The prompt, which must contain all system messages: some templates drop all but the
        first."""
        places = [number for number, item in enumerate(messages) if item.get("role") == "system"]
        are_first = places == list(range(len(places)))
        kind = f"system {are_first} {len(places) > 1}"
        if not places or kind in self._seen:
            return text
        self._seen.add(kind)
        words = {number: f"Systemword{number}seven" for number in places}
        probe = [
            {**item, "content": words[number]} if number in words else item
            for number, item in enumerate(messages)
        ]
        for other in _list_orders(shape):
            try:
                tried = render(other.apply(probe))
            except UserError:
                continue
            if all(word in tried for word in words.values()):
                if other == shape:
                    break
                self._shape = other
                return render(other.apply(messages))
        return text

    def _try_calls(self, render: Render) -> None:
        best, chosen, knows_calls = -1, self._shape, False
        for shape in _SHAPES:
            score = 0
            for said in ("", _SAID):
                try:
                    text = render(shape.apply(complete_messages(_describe_probe(said))))
                except UserError:
                    continue
                score += sum(word in text for word in _WORDS)
                score -= sum(word in text for word in _WRONG)
                knows_calls = knows_calls or _NAME in text
            if score > best:
                best, chosen = score, shape
            if best == 2 * len(_WORDS):
                break
        self._shape, self._knows_calls = chosen, knows_calls


def _list_orders(shape: Shape) -> Iterator[Shape]:
    """The shape, and it with ever fewer messages in their own places: prompts of earlier turns stay
    the beginnings of later ones."""
    for takes_turns in (shape.takes_turns, True):
        own = replace(shape, takes_turns=takes_turns)
        yield own
        yield (later := replace(own, tells_later_systems=True))
        yield replace(later, joins_systems=True)
        yield replace(own, tells_systems=True)


def _write_calls(message: dict[str, Any], write: WriteCalls) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call.get("function", call) for call in calls]
    named = [(str(item.get("name")), _read_object(item.get("arguments"))) for item in functions]
    said = message.get("content") or ""
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{said}\n{write(named)}" if said else write(named)}


_SHAPES = (
    Shape(),
    Shape(writes_arguments=True),
    Shape(has_no_content=True),
    Shape(shortens_ids=True),
    Shape(writes_arguments=True, has_no_content=True),
    Shape(writes_arguments=True, shortens_ids=True),
    Shape(has_parts=True),
    Shape(has_parts=True, writes_arguments=True),
)
_WORDS = (_WORD, _NAME, _KEY, _VALUE, _RESULT)
_WRONG = (f"'{_KEY}'", f'\\"{_KEY}', "'type'")
"""Parts of a text that show a template writing dictionaries as Python does, or texts as JSON."""
