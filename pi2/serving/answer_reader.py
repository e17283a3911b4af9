"""Divides the text of an answer, as it comes, into reasoning, content and calls of tools."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pi2.engine.answer import find_overlap
from pi2.serving.call_patterns import CallForm, ToolCall, Tools
from pi2.serving.literals import NoCall, NotWhole, dump_json_text

Pair = tuple[str, str]
"""What a part of an answer begins and ends with."""
_DEFAULT = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a family marks the parts of an answer."""

    name: str
    known_by: Sequence[Sequence[str]] = ()
    """Sets of marks: the template has one of them, or the vocabulary has a part of one."""
    template_has: Sequence[str] = ()
    """Further text that the template must have."""
    calls: Sequence[CallForm] = ()
    """How calls are written, and the other ways in which they are read."""
    reasoning: Sequence[Pair] = ()
    content: Sequence[Pair] = ()
    """Marks around the answer to the user."""
    skip: Sequence[str] = ()
    """What says nothing between the parts."""
    is_loose: bool = False
    """Whether a known tool's call is read without marks, at the beginning or in a code fence."""
    is_channels: bool = False
    """Whether every message has a channel, as gpt-oss writes them."""

    def _score(self, template: str, vocabulary: Iterable[str]) -> tuple[int, int, int]:
        if not all(mark in template for mark in self.template_has):
            return (0, 0, 0)
        best = (0, 0, 0)
        for marks in self.known_by:
            if all(mark in template or mark in vocabulary for mark in marks):
                more = self.template_has
                seen = sum(mark in template for mark in marks) + len(more)
                length = sum(map(len, (*marks, *more)))
                best = max(best, (seen, len(marks) + len(more), length))
        return best


@cache
def list_formats() -> Sequence[Format]:
    folder = resources.files("pi2.serving") / "formats"
    tables = [
        table
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
        for table in tomllib.loads(file.read_text("utf-8"))["formats"]
    ]
    return [_read_format(table) for table in tables]


def _read_format(table: Mapping[str, Any]) -> Format:
    values = dict(table)
    for key in ("reasoning", "content"):
        values[key] = [(begin, end) for begin, end in table.get(key, ())]
    values["calls"] = [CallForm(**form) for form in table.get("calls", ())]
    return Format(**values)


def find_format(template: str, vocabulary: Iterable[str] = ()) -> Format:
    formats = list_formats()
    best = max(formats, key=lambda found: found._score(template, vocabulary))
    if best._score(template, vocabulary) > (0, 0, 0):
        return best
    return next(found for found in formats if found.name == _DEFAULT)


def find_pairs(template: str, vocabulary: Iterable[str]) -> list[Pair]:
    pairs = dict.fromkeys(pair for found in list_formats() for pair in found.reasoning)
    return [
        pair
        for pair in pairs
        if pair[0] in template or pair[1] in template or pair[1] in vocabulary
    ]


def list_call_forms(format: Format) -> list[tuple[CallForm, bool]]:
    own = [(form, True) for form in format.calls]
    begins = {form.begin for form in format.calls if form.begin}
    others = [
        (form, False)
        for other in list_formats()
        for form in other.calls
        if other.name != format.name and form.begin in begins and not other.is_channels
    ]
    return own + others


def describe_tools(format: Format, tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(dump_json_text(tool) for tool in tools)
    example = format.calls[0].write([("NAME", {"PARAMETER": "VALUE"})])
    return (
        "You can call functions. Their signatures as JSON:\n"
        f"{listed}\n"
        f"To call one, write nothing but\n{example}"
    )


Part = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Fragment:
    part: Part
    text: str


Items = list[Fragment | ToolCall]


Step = Callable[[Items, bool], bool]
"""Adds the certain part, at the end (True) the rest; whether another step may follow."""
LONG, GROWTH = 2000, 1.05
"""Characters from which on a call is read again only where it may have ended, or has grown so."""
_LONGEST_MARK = 64


class AnswerReader:
    """Takes text and gives fragments and calls as soon as they are certain."""

    def __init__(self, steps: Mapping[str, Step], state: str) -> None:
        """``steps`` by the state in which each is made, the first of which is ``state``."""
        self._steps, self._state = steps, state
        self._held = ""
        """Text of which nothing is certain."""
        self._tried = 0
        """Length of a long call that was read in vain."""

    def push(self, text: str) -> Items:
        """Take text; return the certain part."""
        self._held += text
        ends = self._list_call_ends()
        if ends is not None and len(self._held) > LONG:
            tail = self._held[-len(text) - _LONGEST_MARK :]
            has_ended = any(end and end in tail for end in ends)
            if not has_ended and len(self._held) < self._tried * GROWTH:
                return []
            self._tried = len(self._held)
        return self._go_on(last=False)

    def flush(self) -> Items:
        """Return the rest at the end."""
        found = self._go_on(last=True)
        self._give_rest(found)
        self._held = ""
        return found

    def _go_on(self, *, last: bool) -> Items:
        found: Items = []
        while self._steps[self._state](found, last):
            pass
        return found

    def _list_call_ends(self) -> Sequence[str] | None:
        """Marks that end the call that is read; None outside of calls."""
        raise NotImplementedError

    def _give_rest(self, found: Items) -> None:
        """Add the text that is held at the end."""
        raise NotImplementedError


_BARE = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:name|type|function|arguments|parameters|id)"')
_BARE_BEGINNING = re.compile(r'\s*(?:\[\s*)?(?:\{\s*(?:"[a-z]*)?)?\Z')
_LIST = re.compile(r"\s*\[\s*([\w.-]+)\(")
_LIST_BEGINNING = re.compile(r"\s*(?:\[\s*[\w.-]*)?\Z")
_FENCE = "```"
_OPENING = re.compile(r"```(?:json|tool_call|tool_code|xml)?[ \t]*\n?")
_OPENING_BEGINNING = re.compile(r"`{1,3}(?:[a-z_]{0,9})?[ \t]*\n?\Z")
_CLOSING = re.compile(r"\s*```")
_BARE_JSON = CallForm(call='{"name": "$name", "arguments": $arguments}')
_BARE_LIST = CallForm(call="$name($keywords)", is_list=True)


class MarkedReader(AnswerReader):
    def __init__(
        self,
        format: Format,
        *,
        tools: Tools | None = None,
        reasoning: Sequence[Pair] = (),
        content: Sequence[Pair] = (),
        prompt: str = "",
    ) -> None:
        """``tools``: None leaves calls in the content; ``prompt`` may have written a mark."""
        steps = {
            "between": self._begin_part,
            "reasoning": self._read_reasoning,
            "content": self._read_content,
            "call": self._read_call,
            "more": self._read_more,
        }
        super().__init__(steps, "between")
        self._tools = tools
        self._is_loose = format.is_loose and bool(tools)
        self._forms = [] if tools is None else list_call_forms(format)
        self._begins = list(dict.fromkeys(form.begin for form, _ in self._forms if form.begin))
        self._reasoning, self._wraps, self._skips = reasoning, content, format.skip
        self._end = ""
        """The mark that ends the part that is open."""
        self._kept = ""
        """A mark that ended the content, if nothing but marks follow."""
        self._blank = ""
        """Line breaks before what may be a call."""
        self._fresh = True
        """Whether the part has no text yet: it begins with no empty lines."""
        self._is_first = True
        """Whether nothing has come."""
        self._open: list[tuple[CallForm, bool]] = []
        """How the calls may be written within the mark that has begun them."""
        self._fence = _FenceTracker()
        self._is_plain = not (reasoning or content or self._forms or self._skips)
        ended = prompt.rstrip()
        for pair in (*reasoning, *content):
            if ended.endswith(pair[0]):
                self._state = "reasoning" if pair in reasoning else "content"
                self._end, self._is_first = pair[1], False

    def _list_call_ends(self) -> Sequence[str] | None:
        is_call = self._state in ("call", "more")
        return [form.closing for form, _ in self._open] if is_call else None

    def _give_rest(self, found: Items) -> None:
        part: Part = "reasoning" if self._state == "reasoning" else "content"
        self._add(found, part, self._blank + self._held)
        self._blank = ""

    def _begin_part(self, found: Items, last: bool) -> bool:
        text = self._held.lstrip()
        if not text and not last:
            return False
        pairs = (*self._reasoning, *self._wraps)
        marks = [*(pair[0] for pair in pairs), *self._skips, *self._begins]
        if self._is_first:
            # Some write the end of a reasoning that they have left out.
            marks += [end for _, end in self._reasoning]
        mark = max((mark for mark in marks if text.startswith(mark)), key=len, default="")
        if not last and any(len(text) < len(own) and own.startswith(text) for own in marks):
            return False
        if not text:
            if self._kept:
                self._held = self._kept = ""
            return False
        self._is_first = False
        if not mark:
            return self._begin_content(found, text, last)
        self._kept, self._fresh = "", True
        if mark in self._begins:
            self._held, self._state, self._end = text, "call", ""
            self._open = [item for item in self._forms if item[0].begin == mark]
            return True
        self._held = text[len(mark) :]
        for pair in pairs:
            if mark == pair[0]:
                self._state = "reasoning" if pair in self._reasoning else "content"
                self._end = pair[1]
        return True

    def _begin_content(self, found: Items, text: str, last: bool) -> bool:
        if self._is_loose and not self._kept:
            if not last and bool(_BARE_BEGINNING.match(text) or _LIST_BEGINNING.match(text)):
                return False
            named = _LIST.match(text)
            is_list = named is not None and named[1] in (self._tools or {})
            if is_list or _BARE.match(text):
                self._held, self._state = text, "call"
                self._open = [(_BARE_LIST if is_list else _BARE_JSON, False)]
                return True
        if not self._kept:
            self._end = ""
        self._held, self._kept, self._state = self._kept + self._held, "", "content"
        if self._end:
            # What ended the content was part of it.
            self._add(found, "content", self._end)
            self._held = self._held[len(self._end) :]
        return True

    def _read_reasoning(self, found: Items, last: bool) -> bool:
        at = self._held.find(self._end)
        if at < 0:
            self._give(found, "reasoning", [self._end])
            return False
        self._add(found, "reasoning", self._held[:at])
        self._held = self._held[at + len(self._end) :]
        self._state, self._fresh = "between", True
        for begin, end in self._wraps:
            if begin == self._end:
                self._state, self._end = "content", end
        return True

    def _read_content(self, found: Items, last: bool) -> bool:
        marks = [*self._begins, *([self._end] if self._end else [])]
        if self._is_loose and not self._fence.is_open:
            marks.append(_FENCE)
        places = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not places:
            self._give(found, "content", marks)
            return False
        at, _, mark = min(places)
        text = self._held[:at]
        self._held = self._held[at:]
        if mark == self._end:
            self._add(found, "content", text)
            self._held = self._held[len(mark) :]
            self._kept, self._state = mark, "between"
            return True
        said = text.rstrip("\n")
        self._add(found, "content", self._blank * bool(said) + said)
        self._blank = self._blank * (not said) + text[len(said) :]
        if mark == _FENCE:
            return self._open_fence(found, last)
        self._state = "call"
        self._open = [item for item in self._forms if item[0].begin == mark]
        return True

    def _open_fence(self, found: Items, last: bool) -> bool:
        if bool(self._fence._line.strip()) and not self._blank:
            self._give_mark(found, _FENCE)
            return True
        opening = _OPENING.match(self._held)
        rest = self._held[opening.end() :] if opening else ""
        if not last and (
            _OPENING_BEGINNING.match(self._held) or (opening and _BARE_BEGINNING.match(rest))
        ):
            return False
        if opening is None or not _BARE.match(rest):
            self._give_mark(found, _FENCE)
            return True
        self._state, self._open = "call", [(_BARE_JSON, False)]
        return True

    def _read_call(self, found: Items, last: bool) -> bool:
        begin = self._open[0][0].begin
        opening = None if begin else _OPENING.match(self._held)
        start = len(begin) if opening is None else opening.end()
        is_waiting = False
        for form, is_own in self._open:
            try:
                calls, end = form.read(self._held, start, self._tools or {}, last=last)
                if not is_own and not all(call.name in (self._tools or {}) for call in calls):
                    continue
                if opening is not None:
                    end = self._close_fence(end, last)
                if self._is_quoted(form, end, last):
                    break
            except NotWhole:
                is_waiting = True
                continue
            except NoCall:
                continue
            found += calls
            self._held, self._fresh, self._blank = self._held[end:], True, ""
            self._state, self._open = "more", [(form, is_own)]
            if opening is not None:
                self._state = "between"
            return True
        if is_waiting and not last:
            return False
        # It is no call: the client sees what the model wrote.
        self._state = "content"
        self._give_mark(found, begin or (_FENCE if opening else self._held[:1]))
        return True

    def _close_fence(self, end: int, last: bool) -> int:
        """End of the code fence around calls that end at ``end``."""
        closing = _CLOSING.match(self._held, end)
        if closing is not None:
            return closing.end()
        rest = self._held[end:].strip()
        if not last and _FENCE.startswith(rest):
            raise NotWhole
        raise NoCall

    def _is_quoted(self, form: CallForm, end: int, last: bool) -> bool:
        if not self._fence.is_open:
            return False
        rest = self._held[end:].lstrip()
        if form.end and rest.startswith(form.end):
            rest = rest[len(form.end) :].lstrip()
        elif not last and form.end.startswith(rest):
            raise NotWhole
        if not last and _FENCE.startswith(rest):
            raise NotWhole
        return rest.startswith(_FENCE)

    def _read_more(self, found: Items, last: bool) -> bool:
        form = self._open[0][0]
        text = self._held.lstrip(" \t\r\n" + (";," if form.is_json else ""))
        if form.end and text.startswith(form.end):
            self._held, self._state = text[len(form.end) :], "between"
            return True
        if form.end.startswith(text) and (text or not last):
            if last:  # the answer was cut inside the mark
                self._held = ""
            return False
        is_next = text.startswith("{") if form.is_json else form.is_shared
        try:
            if not is_next or not text:
                raise NoCall
            calls, end = form.read(text, 0, self._tools or {}, last=last)
            if not self._open[0][1] and not all(call.name in (self._tools or {}) for call in calls):
                raise NoCall
        except NotWhole:
            return False
        except NoCall:
            self._state = "between"
            return bool(self._held)
        found += calls
        self._held = text[end:]
        return True

    def _give(self, found: Items, part: Part, marks: Sequence[str]) -> None:
        cut = len(self._held) - find_overlap(self._held, marks)
        if part == "content" and self._begins:
            cut = len(self._held[:cut].rstrip("\n"))
        self._add(found, part, self._held[:cut])
        self._held = self._held[cut:]

    def _give_mark(self, found: Items, mark: str) -> None:
        self._add(found, "content", self._blank + mark)
        self._held, self._blank = self._held[len(mark) :], ""

    def _add(self, found: Items, part: Part, text: str) -> None:
        if self._fresh and not self._is_plain:
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            if part == "content":
                self._fence.add(text)
            found.append(Fragment(part, text))


class _FenceTracker:
    def __init__(self) -> None:
        self._is_open = False
        """Before the line that is not whole."""
        self._line = ""

    @property
    def is_open(self) -> bool:
        return self._is_open != self._line.lstrip().startswith(_FENCE)

    def add(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._is_open ^= line.lstrip().startswith(_FENCE)


def make_plain_reader() -> AnswerReader:
    return MarkedReader(Format(name="plain"))
