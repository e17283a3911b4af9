"""Conversations that go on are read as they were sampled.

A client sends an answer back as text, and the tokens of that text need not be those that the model
has drawn.  What was drawn is remembered for a while: where the prompt of the next turn begins with
the same text, it begins with the same tokens, whose keys and values are known.

Calls of tools come back as names and objects, and templates write these in their own way: with
other spaces, and without what was thought before.  What the model wrote is remembered by what it
called.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from pi2.engine.answer import SequenceResult

_MOST_CONVERSATIONS = 64
_MOST_CHARACTERS = 8 << 20
_MOST_CALLS = 1024
_MOST_TIMES = 8


class Replay:
    """Remembers what was sampled.  Any thread may ask."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, array[int]] = OrderedDict()
        """Tokens by the text of prompt and answer, those that were used longest ago first."""
        self._characters = 0
        self._calls: OrderedDict[str, list[str]] = OrderedDict()
        """What the model wrote, by what it said and called: each time, the latest last."""
        self._lock = Lock()

    def note(self, text: str, ids: Sequence[int]) -> None:
        """Remember that ``text``, a prompt and its answer, was ``ids``, no end token among them."""
        with self._lock:
            if text in self._turns or len(text) > _MOST_CHARACTERS:
                return
            self._turns[text] = array("i", ids)
            self._characters += len(text)
            while len(self._turns) > _MOST_CONVERSATIONS or self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._turns.popitem(last=False)[0])

    def note_answer(self, prompt: str, prompt_ids: Sequence[int], result: SequenceResult) -> None:
        """Remember what was sampled after ``prompt``, if the model ended its answer itself: a turn
        that was cut goes on otherwise than its tokens did."""
        if result.finish_reason == "eos":
            self.note(prompt + result.text, [*prompt_ids, *result.token_ids[:-1]])

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokens of a prompt: those that are remembered of its longest beginning, and what
        ``encode`` makes of the rest."""
        with self._lock:
            found = self._find(text)
            if not found:
                return encode(text)
            self._turns.move_to_end(found)
            ids = list(self._turns[found])
        rest = text[len(found) :]
        return ids + (encode(rest) if rest else [])

    def _find(self, text: str) -> str:
        """The longest beginning of ``text`` that is remembered."""
        return max((turn for turn in self._turns if text.startswith(turn)), key=len, default="")

    def measure(self, text: str) -> int:
        """Characters of the longest beginning that is remembered."""
        with self._lock:
            return len(self._find(text))

    def note_calls(self, content: str, calls: Sequence[tuple[str, Any]], written: str) -> None:
        """Remember how the model wrote ``content`` and ``calls``: names, and arguments as JSON
        values."""
        if len(written) > _MOST_CHARACTERS // _MOST_CALLS:
            return
        with self._lock:
            key = _describe_answer(content, calls)
            self._calls[key] = [*self._calls.get(key, ()), written][-_MOST_TIMES:]
            self._calls.move_to_end(key)
            while len(self._calls) > _MOST_CALLS:
                self._calls.popitem(last=False)

    def recall(self, answers: Sequence[tuple[str, Sequence[tuple[str, Any]]]]) -> list[str | None]:
        """What the model wrote when it said and called each of these, one after the other; None for
        what is not known.  If it did the same several times, the last times count."""
        keys = [_describe_answer(content, calls) for content, calls in answers]
        with self._lock:
            known = {key: list(self._calls.get(key, ())) for key in keys}
        found = [known[key].pop() if known[key] else None for key in reversed(keys)]
        return found[::-1]


def _describe_answer(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    return json.dumps([content.strip(), list(calls)], sort_keys=True)
