"""How a family writes a call: a pattern with holes, by which calls are read and written.

``<function=$name>$parameters</function>`` is such a pattern. When it is read, white space in it
matches any white space. Its holes: ``$name``; ``$arguments`` (a JSON object); ``$parameters`` (each
by a pattern of its own, with ``$key`` and ``$value``); ``$keywords`` (as in Python); ``$pairs`` (as
``{a:1}``); ``$index``, ``$id`` and ``$kind``, which say nothing new; ``$code``. A pattern that is a
JSON object is read as JSON, with its keys in any order."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pi2.serving.literals import (
    Literals,
    NoCall,
    NotWhole,
    dump_json_text,
    find_json_end,
    keep_text,
    load_json,
    name_type,
    read_value,
    write_literal,
)
from pi2.serving.schemas import list_parameter_types

Tools = Mapping[str, Mapping[str, Any]]
"""OpenAI's ``function`` objects by their names."""
_HOLE = re.compile(r"\$([a-z]+)")
_NAME = re.compile(r"[\w.:/-]+")
_INTERPRETERS = ("python", "ipython", "code_interpreter")
"""Names of tools that take code as it is."""
_FENCE = re.compile(r"```\w*\s")
_FENCE_CHARACTERS = 16
_SHORT = 4
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, as the model wrote it where that is one."""


def split_pattern(pattern: str) -> list[str]:
    """Literals and holes, these with their ``$``."""
    return [part for part in re.split(r"(\$[a-z]+)", pattern) if part]


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How calls are written."""

    begin: str = ""
    """The mark before a call, or before a list of them; none if the answer begins with the call."""
    end: str = ""
    """The mark after it."""
    call: str
    """The pattern of a call."""
    parameter: str = ""
    """The pattern of a parameter."""
    between: str = ""
    """Text between two calls."""
    is_shared: bool = False
    """Whether one begin and one end are around all calls."""
    is_list: bool = False
    """Whether the calls are a list, with brackets."""
    identity: str = ""
    """The pattern of a call's id in a conversation, if it is not any."""
    quote: str = '"'
    """The mark around texts in ``$pairs``."""

    @cached_property
    def is_json(self) -> bool:
        return self.call.strip().startswith("{")

    @cached_property
    def closing(self) -> str:
        """The mark that a call ends with, at the latest; none if it has none."""
        last = split_pattern(self.call)[-1].split()[-1]
        is_mark = len(last) > _SHORT and not (self.is_json or last.startswith("$"))
        return self.end if self.is_list or not is_mark else last

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        written = [self._write(number, *call) for number, call in enumerate(calls)]
        if self.is_list:
            return f"{self.begin}[{(self.between or ', ').join(written)}]{self.end}"
        if self.is_shared:
            return f"{self.begin}{self.between.join(written)}{self.end}"
        return self.between.join(f"{self.begin}{call}{self.end}" for call in written)

    def write_identity(self, name: str, number: int) -> str:
        return self.identity.replace("$name", name).replace("$index", str(number))

    def _write(self, number: int, name: str, arguments: Any) -> str:
        values = arguments if isinstance(arguments, dict) else {}
        fills = {
            "name": lambda: name,
            "index": lambda: str(number),
            "id": lambda: f"call{number:05}",
            "arguments": lambda: dump_json_text(arguments),
            "parameters": lambda: "".join(self._write_parameter(*item) for item in values.items()),
            "keywords": lambda: ", ".join(
                f"{key}={write_literal(value)}" for key, value in values.items()
            ),
            "pairs": lambda: self._write_pairs(values),
            "code": lambda: str(next(iter(values.values()), "")),
        }
        return _HOLE.sub(lambda hole: fills[hole[1]](), self.call)

    def _write_parameter(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else dump_json_text(value)
        kind = describe_kind(self.parameter, name_type(value))
        fills = {"key": key, "value": text, "kind": kind}
        return _HOLE.sub(lambda hole: fills[hole[1]], self.parameter)

    def _write_pairs(self, value: Any) -> str:
        if isinstance(value, dict):
            items = (f"{key}:{self._write_pairs(item)}" for key, item in value.items())
            return f"{{{','.join(items)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._write_pairs, value))}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def read(self, text: str, at: int, tools: Tools, *, last: bool) -> tuple[list[ToolCall], int]:
        """The next calls and where they end; `NotWhole` or `NoCall`.  ``last``: the text ends."""
        reader = _Reader(self, text, tools, last=last)
        at = reader.skip(at)
        try:
            if self.is_json:
                return reader.read_json(at)
            if not self.is_list:
                call, at = reader.read_pattern(at)
                return [call], at
            return reader.read_list(at)
        except NotWhole:
            if last:
                raise NoCall from None
            raise


def describe_kind(parameter: str, kind: str) -> str:
    if 'string="$kind"' in parameter:
        return "true" if kind == "string" else "false"
    return "number" if kind == "integer" else kind


class _Reader:
    def __init__(self, form: CallForm, text: str, tools: Tools, *, last: bool) -> None:
        self._form = form
        self._text = text
        self._tools = tools
        self._last = last

    def skip(self, at: int) -> int:
        """The next place that is no white space; `NotWhole` at the end."""
        while at < len(self._text) and self._text[at].isspace():
            at += 1
        if at == len(self._text):
            raise NotWhole
        return at

    def _starts(self, at: int, mark: str) -> bool:
        """Whether a mark is at a place; `NotWhole` if it may become one."""
        text = self._text
        if text.startswith(mark, at):
            return True
        if not self._last and len(text) - at < len(mark) and mark.startswith(text[at:]):
            raise NotWhole
        return False

    def match(self, at: int, literal: str) -> int:
        for chunk in re.split(r"(\s+)", literal):
            if not chunk:
                continue
            if chunk.isspace():
                while at < len(self._text) and self._text[at].isspace():
                    at += 1
            elif self._starts(at, chunk):
                at += len(chunk)
            else:
                raise NoCall
        return at

    def read_json(self, at: int) -> tuple[list[ToolCall], int]:
        text = self._text
        fence = _FENCE.match(text, at)
        start = at if fence is None else self.skip(fence.end())
        if text[start] not in "{[":
            if text.startswith("`", at) and len(text) - at < _FENCE_CHARACTERS:
                raise NotWhole
            raise NoCall
        end = find_json_end(text, start)
        if end is None:
            raise NotWhole
        at = start
        value = load_json(text[at:end])
        items = value if isinstance(value, list) else [value]
        whole = None if isinstance(value, list) else text[at:end]
        calls = [self._read_object(item, whole) for item in items]
        if not calls:
            raise NoCall
        return calls, end if fence is None else self.match(end, " ```")

    def _read_object(self, value: Any, text: str | None) -> ToolCall:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict):
            raise NoCall
        if "$name" in self._form.call.partition(":")[0] and len(value) == 1:
            name, arguments = next(iter(value.items()))
            key = name
        else:
            names = (value.get(key) for key in ("name", "tool_name", "function"))
            name = next((found for found in names if isinstance(found, str) and found), None)
            keys = ("arguments", "parameters", "input", "args")
            key = next((key for key in keys if key in value), "")
            arguments = value.get(key, {})
        if name is None:
            raise NoCall
        if isinstance(arguments, str):
            return ToolCall(name, arguments or "{}")
        raw = None if text is None else _find_raw_value(text, key)
        if raw is not None and load_json(raw) == arguments:
            return ToolCall(name, keep_text(raw, arguments))
        return ToolCall(name, dump_json_text({} if arguments is None else arguments))

    def read_list(self, at: int) -> tuple[list[ToolCall], int]:
        if self._text[at] != "[":
            raise NoCall
        at += 1
        calls: list[ToolCall] = []
        while True:
            at = self.skip(at)
            if self._text[at] == "]" and calls:
                return calls, at + 1
            if calls:
                if self._text[at] != ",":
                    raise NoCall
                at = self.skip(at + 1)
            call, at = self.read_pattern(at)
            calls.append(call)

    def read_pattern(self, at: int) -> tuple[ToolCall, int]:
        parts = split_pattern(self._form.call.lstrip())
        name, arguments = "", "{}"
        for number, part in enumerate(parts):
            rest = parts[number + 1 :]
            match part:
                case "$name":
                    at, name = self._read_name(at, rest)
                case "$index" | "$id":
                    at, _ = self._read_until(at, rest)
                case "$arguments":
                    at, arguments = self._read_arguments(at)
                case "$parameters":
                    at, values = self._read_parameters(at, name, rest)
                    arguments = dump_json_text(values)
                case "$keywords":
                    literals = Literals(self._text, at)
                    # The pattern closes them, and so does this.
                    values = literals.read_pairs("=", ")")
                    at, arguments = literals.at - 1, dump_json_text(values)
                case "$pairs":
                    at = self.match(at, "{")
                    literals = Literals(self._text, at, self._form.quote)
                    values = literals.read_pairs(":", "}")
                    at, arguments = literals.at, dump_json_text(values)
                case "$code":
                    at, name, arguments = self._read_code(at)
                case _:
                    at = self.match(at, part)
        if parts[-1] == "$parameters" and self._form.end:
            self.match(at, f" {self._form.end}")
        return ToolCall(name, arguments), at

    def _read_name(self, at: int, rest: Sequence[str]) -> tuple[int, str]:
        stop = rest[0].strip() if rest and not rest[0].startswith("$") else ""
        found = _NAME.match(self._text, at)
        if found is None:
            raise NotWhole if at == len(self._text) else NoCall
        end = found.end()
        if stop and (place := self._text.find(stop, at, end + len(stop))) > at:
            end = place
        elif end == len(self._text):
            raise NotWhole
        return end, self._text[at:end]

    def _read_until(self, at: int, rest: Sequence[str]) -> tuple[int, str]:
        end = self._text.find(rest[0].strip(), at)
        if end < 0:
            if any(sign.isspace() for sign in self._text[at:]):
                raise NoCall
            raise NotWhole
        return end, self._text[at:end]

    def _read_arguments(self, at: int) -> tuple[int, str]:
        at = self.skip(at)
        if self._text[at] != "{":
            raise NoCall
        end = find_json_end(self._text, at)
        if end is None:
            raise NotWhole
        value = load_json(self._text[at:end])
        if not isinstance(value, dict):
            raise NoCall
        return end, keep_text(self._text[at:end], value)

    def _read_code(self, at: int) -> tuple[int, str, str]:
        tool = next((name for name in _INTERPRETERS if name in self._tools), None)
        if tool is None:
            raise NoCall
        if not self._last:
            raise NotWhole
        properties = (self._tools[tool].get("parameters") or {}).get("properties") or {}
        key = next(iter(properties), "code")
        return len(self._text), tool, dump_json_text({key: self._text[at:]})

    def _read_parameters(
        self, at: int, name: str, rest: Sequence[str]
    ) -> tuple[int, dict[str, Any]]:
        parts = split_pattern(self._form.parameter)
        number = parts.index("$value")
        opening, closing = parts[:number], "".join(parts[number + 1 :])
        tool = self._tools.get(name)
        values: dict[str, Any] = {}
        while True:
            start = self.skip(at)
            is_end = bool(rest) and self._starts(start, rest[0].split()[0])
            if is_end or not self._starts(start, opening[0]):
                return start, values
            key, kind, at = "", "", start
            for place, part in enumerate(opening):
                following = [*opening[place + 1 :], closing]
                if part == "$key":
                    at, key = self._read_key(at, following)
                elif part == "$kind":
                    at, kind = self._read_until(at, following)
                else:
                    # White space before a value is the value's, but for a line break.
                    at = self.match(at, part.rstrip() if place + 1 == len(opening) else part)
            own_closing = closing.replace("$key", key)
            text, at = self._read_parameter_text(at, opening[0], own_closing, rest)
            if opening[-1].endswith("\n"):
                text = text.removeprefix("\n")
            if own_closing.startswith("\n"):
                text = text.removesuffix("\n")
            values[key] = self._read_parameter(tool, key, kind, text)

    def _read_key(self, at: int, rest: Sequence[str]) -> tuple[int, str]:
        end = self._text.find(rest[0].split()[0] if rest[0].split() else rest[0], at)
        if end < 0:
            if "\n" in self._text[at:].strip():
                raise NoCall
            raise NotWhole
        key = self._text[at:end].strip()
        if not key or "\n" in key:
            raise NoCall
        return end, key

    def _read_parameter_text(
        self, at: int, opening: str, closing: str, rest: Sequence[str]
    ) -> tuple[str, int]:
        """A value's text, up to a mark after which the pattern goes on."""
        mark = closing.strip()
        after = "".join(rest) + self._form.end
        end = self._text.find(mark, at)
        loose = -1
        while end >= 0:
            place = end + len(mark)
            while place < len(self._text) and self._text[place].isspace():
                place += 1
            if place == len(self._text):
                if not self._last:
                    raise NotWhole
                loose = end if loose < 0 else loose
            elif self._starts(place, opening.strip()) or self._follows(place, after):
                return self._text[at:end], end + len(mark)
            elif loose < 0 and self._follows(place, "".join(rest)):
                loose = end
            end = self._text.find(mark, end + 1)
        if self._last and loose >= 0:
            return self._text[at:loose], loose + len(mark)
        raise NotWhole

    def _follows(self, at: int, pattern: str) -> bool:
        if self._form.is_shared and (close := pattern.removesuffix(self._form.end)) != pattern:
            # Another call may follow instead of the end.
            if self._follows(at, close) and self._can_go_on(at, close):
                return True
        try:
            self.match(at, pattern)
        except NoCall:
            return False
        return True

    def _can_go_on(self, at: int, close: str) -> bool:
        at = self.skip(self.match(at, close))
        return self._starts(at, split_pattern(self._form.call.lstrip())[0].strip())

    def _read_parameter(
        self, tool: Mapping[str, Any] | None, key: str, kind: str, text: str
    ) -> Any:
        cdata = _CDATA.fullmatch(text)
        if cdata is not None:
            text = cdata[1]
        types = list_parameter_types(tool, key)
        return text if kind in ("true", "string") and not types else read_value(text, types)


def _find_raw_value(text: str, key: str) -> str | None:
    """The text of the object that stands for ``key``, as it was written."""
    found = re.search(rf'"{re.escape(key)}"\s*:\s*(?=\{{)', text)
    end = None if found is None else find_json_end(text, found.end())
    return None if found is None or end is None else text[found.end() : end]
