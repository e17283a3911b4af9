"""Divides the text of an answer, as it comes, into reasoning, content and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pi2.serving.tool_formats import ToolCall, ToolFormat

Part = Literal["reasoning", "content"]

REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""What reasoning begins and ends with."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Text of a part of the answer, or a call."""

    part: Part
    text: str


def _find_overlap(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``marks``."""
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    return most


class AnswerReader:
    """Takes text and gives fragments and calls as soon as they are certain."""

    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        reasoning: tuple[str, str] | None = None,
        begins_inside: bool = False,
    ) -> None:
        """``tools``: how calls are written, where there are tools; ``reasoning``: its marks, where
        the model reasons; ``begins_inside``: the prompt has written the first of them."""
        self._tools = tools
        self._reasoning = reasoning
        self._state: Literal["start", "reasoning", "content", "call"] = (
            "reasoning" if begins_inside and reasoning is not None else "start"
        )
        self._held = ""
        self._fresh = True
        """Whether the part has no text yet: it begins with no empty lines."""

    def push(self, text: str) -> list[Fragment | ToolCall]:
        """Take text; return what is certain."""
        self._held += text
        found: list[Fragment | ToolCall] = []
        while self._advance(found, last=False):
            pass
        return found

    def flush(self) -> list[Fragment | ToolCall]:
        """Return what is left at the end."""
        found: list[Fragment | ToolCall] = []
        while self._advance(found, last=True):
            pass
        if self._held and self._state == "call":
            self._end_call(found, self._held)
        elif self._held:
            part: Part = "reasoning" if self._state == "reasoning" else "content"
            self._add(found, part, self._held)
        self._held = ""
        return found

    def _advance(self, found: list[Fragment | ToolCall], *, last: bool) -> bool:
        """Go on by one state; whether there may be more."""
        if self._state == "start":
            return self._start(last=last)
        if self._state == "reasoning":
            assert self._reasoning is not None
            return self._take_until(found, "reasoning", (self._reasoning[1],))
        if self._state == "content":
            marks = () if self._tools is None else self._tools.begin
            return self._take_until(found, "content", marks)
        return self._take_call(found)

    def _start(self, *, last: bool) -> bool:
        """See what an answer begins with."""
        text = self._held.lstrip()
        marks = [] if self._reasoning is None else [self._reasoning[0]]
        for mark in marks:
            if text.startswith(mark):
                self._held = text[len(mark) :]
                self._state, self._fresh = "reasoning", True
                return True
        if not last and (not text or any(mark.startswith(text) for mark in marks)):
            return False
        is_bare = self._tools is not None and self._tools.bare and text.startswith("{")
        self._state = "call" if is_bare else "content"
        return bool(text)

    def _take_until(
        self, found: list[Fragment | ToolCall], part: Part, marks: Sequence[str]
    ) -> bool:
        """Give the text before the first of ``marks``."""
        places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._add(found, part, self._held[:at])
            self._held = self._held[at + len(mark) :]
            self._state = "content" if part == "reasoning" else "call"
            self._fresh = True
            return True
        keep = _find_overlap(self._held, marks)
        cut = len(self._held) - keep
        self._add(found, part, self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _take_call(self, found: list[Fragment | ToolCall]) -> bool:
        """Give the calls up to the mark that ends them."""
        end = None if self._tools is None else self._tools.end
        at = -1 if end is None else self._held.find(end)
        if at < 0 or end is None:
            return False
        body, self._held = self._held[:at], self._held[at + len(end) :]
        self._end_call(found, body)
        self._state, self._fresh = "content", True
        return True

    def _end_call(self, found: list[Fragment | ToolCall], body: str) -> None:
        assert self._tools is not None
        calls = self._tools.parse(body)
        if calls:
            found += calls
        else:
            # It is no call: the client sees what the model wrote.
            mark = "" if self._tools.bare else self._tools.begin[0]
            found.append(Fragment("content", mark + body))

    def _add(self, found: list[Fragment | ToolCall], part: Part, text: str) -> None:
        if self._fresh and (self._reasoning is not None or self._tools is not None):
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            found.append(Fragment(part, text))
