"""What a chat template says about its family: how answers are written, and whether it reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pi2.engine.answer import find_overlap
from pi2.serving.answer_reader import (
    AnswerReader,
    Format,
    Fragment,
    Items,
    MarkedReader,
    Pair,
    Part,
    find_format,
    find_pairs,
)
from pi2.serving.call_patterns import ToolCall, Tools
from pi2.serving.literals import find_json_end, keep_text, load_json

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel


_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_PARTS: dict[str, Part] = {"analysis": "reasoning", "commentary": "content", "final": "content"}
_TO = re.compile(r"\bto=([^\s<]+)")
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
_USERS = ("assistant", "user", "all")
_HEAD = re.compile(r"\s*(?:assistant\b)?\s*(?:to=|<\|channel\|>|<\|constrain\|>|<\|message\|>)")
"""What the head of a message begins with."""
_HEADS = ("to=", _CHANNEL, "<|constrain|>", _MESSAGE, _START, *_ENDS)
_FOLLOWING = (_START, _CHANNEL)
"""What follows the end of a message."""
_BETWEEN = {"content": "\n\n", "reasoning": "\n"}


class ChannelReader(AnswerReader):
    def __init__(self, *, tools: Tools | None = None, prompt: str = "") -> None:
        """``tools``: None leaves calls in the content; ``prompt`` may have written a head."""
        steps = {"head": self._read_head, "text": self._read_text, "call": self._read_call}
        super().__init__(steps, "head")
        self._tools = tools
        self._head = ""
        """The head of the message that is open, as it was written."""
        self._part: Part = "content"
        self._name = ""
        self._said: set[Part] = set()
        self._is_new = True
        """Whether the message has given no text yet."""
        begun = prompt.rpartition(_START)[2] if _START in prompt else ""
        if _CHANNEL in begun:
            self.push(begun.removeprefix("assistant"))
            self._said, self._is_new = set(), True

    def _list_call_ends(self) -> Sequence[str] | None:
        return _ENDS if self._state == "call" else None

    def _give_rest(self, found: Items) -> None:
        self._add(found, self._held)

    def _read_head(self, found: Items, last: bool) -> bool:
        text = self._held.lstrip()
        for mark in (_START, *_ENDS):
            if text.startswith(mark):
                self._held = text[len(mark) :]
                return True
        at = text.find(_MESSAGE)
        if _HEAD.match(text) is None:
            if not last and _is_beginning(text):
                return False
            # A text without a head.
            self._begin("content", "")
            return bool(text)
        if at < 0:
            self._part = "content"
            return False
        head = text[: at + len(_MESSAGE)].removeprefix("assistant")
        self._held = text[at + len(_MESSAGE) :]
        channel = (_NAMED.findall(head) or [""])[-1]
        recipient = ([to for to in _TO.findall(head) if to not in _USERS] or [""])[-1]
        name = recipient.removeprefix("functions.")
        if recipient and self._tools is not None and (name != recipient or name in self._tools):
            self._begin("content", head)
            self._state, self._name = "call", name
        elif recipient or channel not in _PARTS:
            # Nobody knows what it is: it is shown as it was written.
            self._begin("content", "")
            self._add(found, head)
        else:
            self._begin(_PARTS[channel], head)
        return True

    def _begin(self, part: Part, head: str) -> None:
        self._part, self._head, self._state, self._is_new = part, head, "text", True

    def _read_text(self, found: Items, last: bool) -> bool:
        """Give the text up to the mark that ends the message, followed by a message or nothing."""
        start = 0
        while True:
            places = [(at, m) for m in _ENDS if (at := self._held.find(m, start)) >= 0]
            if not places:
                cut = len(self._held) - find_overlap(self._held, _ENDS)
                self._add(found, self._held[:cut])
                self._held = self._held[cut:]
                return False
            at, mark = min(places)
            rest = self._held[at + len(mark) :].lstrip()
            if rest.startswith(_FOLLOWING) or (last and not rest):
                self._add(found, self._held[:at])
                self._held, self._state = rest, "head"
                return bool(rest)
            if not last and any(follow.startswith(rest) for follow in _FOLLOWING):
                self._add(found, self._held[:at])
                self._held = self._held[at:]
                return False
            start = at + len(mark)

    def _read_call(self, found: Items, last: bool) -> bool:
        text = self._held.lstrip()
        if not text and not last:
            return False
        end = find_json_end(text, 0) if text.startswith("{") else -1
        if end is None and not last:
            return False
        value = load_json(text[:end]) if end is not None and end > 0 else None
        if not isinstance(value, dict) or end is None:
            head = self._head
            self._begin("content", "")
            self._add(found, head)
            return True
        found.append(ToolCall(self._name, keep_text(text[:end], value)))
        self._held, self._state = text[end:].lstrip(), "head"
        return bool(self._held)

    def _add(self, found: Items, text: str) -> None:
        if not text:
            return
        if self._is_new and self._part in self._said:
            found.append(Fragment(self._part, _BETWEEN[self._part]))
        self._is_new = False
        self._said.add(self._part)
        found.append(Fragment(self._part, text))


def _is_beginning(text: str) -> bool:
    if "assistant".startswith(text):
        return True
    rest = text.removeprefix("assistant").lstrip()
    return any(mark.startswith(rest) for mark in _HEADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFacts:
    """What a chat template and a vocabulary say about their family."""

    format: Format
    knows_tools: bool
    reasoning: Sequence[Pair] = ()
    """Marks of reasoning."""
    content: Sequence[Pair] = ()
    """Marks around the answer to the user."""
    marks: Mapping[str, int]
    """Ids of the marks that are single special tokens."""
    shown_ids: frozenset[int]
    """Special tokens that are part of an answer's text: all that do not end it."""

    def make_reader(
        self, *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: str = ""
    ) -> AnswerReader:
        """What divides an answer to ``prompt``; ``tools``: the functions that may be called."""
        named = None if tools is None else {str(tool.get("name")): tool for tool in tools}
        if self.format.is_channels:
            return ChannelReader(tools=named, prompt=prompt)
        return MarkedReader(
            self.format, tools=named, reasoning=self.reasoning, content=self.content, prompt=prompt
        )

    def find_open_reasoning(self, prompt: str) -> Pair | None:
        ended = prompt.rstrip()
        return next((pair for pair in self.reasoning if ended.endswith(pair[0])), None)


def describe_family(
    template: str, marks: Mapping[str, int], special: frozenset[int], ends: frozenset[int]
) -> ChatFacts:
    found = find_format(template, marks)
    wraps = [
        pair for pair in found.content if all(mark in template or mark in marks for mark in pair)
    ]
    return ChatFacts(
        format=found,
        knows_tools=re.search(r"\btools\b", template) is not None,
        reasoning=find_pairs(template, marks),
        content=wraps,
        marks=marks,
        shown_ids=special - ends,
    )


def read_chat_facts(model: LoadedModel) -> ChatFacts:
    """What the chat template of a model says; UserError P608 or P609 if it has none that works."""
    settings = model.plan.model.tokenizer
    template = model.read_chat_template().source
    added = model.texts.list_added_tokens()
    ends = {*settings.eos, *([] if settings.bos is None else [settings.bos])}
    ends |= {number for number, token in added.items() if token.content in _FILLERS}
    return describe_family(
        template,
        {token.content: number for number, token in added.items()},
        frozenset(number for number, token in added.items() if token.special),
        frozenset(ends),
    )


_FILLERS = ("<pad>", "<|pad|>", "[PAD]", "<unk>")
"""Special tokens that stand for nothing."""
