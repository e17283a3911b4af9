"""Conversations that go on are read as they were sampled.

A client sends an answer back as text, and the tokens of that text need not be those that the model
has drawn.  What was drawn is remembered for a while: where the prompt of the next turn begins with
the same text, it begins with the same tokens, whose keys and values are known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

_MOST_CONVERSATIONS = 64
_MOST_CHARACTERS = 8 << 20


class Replay:
    """Remembers what was sampled.  Any thread may ask."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        """Tokens by the text of prompt and answer, those that were used longest ago first."""
        self._characters = 0
        self._lock = Lock()

    def note(self, text: str, ids: Sequence[int]) -> None:
        """Remember that ``text``, a prompt and its answer, was ``ids``, no end token among them."""
        with self._lock:
            if text in self._turns or len(text) > _MOST_CHARACTERS:
                return
            self._turns[text] = tuple(ids)
            self._characters += len(text)
            while len(self._turns) > _MOST_CONVERSATIONS or self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._turns.popitem(last=False)[0])

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokens of a prompt: those that are remembered of its longest beginning, and what
        ``encode`` makes of the rest."""
        with self._lock:
            known = (turn for turn in self._turns if text.startswith(turn))
            found = max(known, key=len, default="")
            if not found:
                return encode(text)
            self._turns.move_to_end(found)
            ids = list(self._turns[found])
        rest = text[len(found) :]
        return ids + (encode(rest) if rest else [])
