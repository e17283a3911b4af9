"""Text pieces out of token ids: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CUT = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers make of bytes that are no character, or not yet."""
MAX_HELD = 16
"""Tokens whose text is held back: a character has at most four bytes, so these will be none."""


class TokenDecoder:
    """Turns one token after the other into text, whole characters at a time.

    Tokens are decoded together with those of the piece before, because the text of a token can
    depend on its neighbours (spaces, bytes of one character).  The first ones go on with a prompt:
    what a decoder leaves out where a text begins, such as Llama 2's first space, is part of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` gives the text of token ids."""
        self._decode = decode
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Take a token and return the text that it completes."""
        self._held.append(token)
        text = self._read_held()
        if text.endswith(_CUT) and len(self._held) < MAX_HELD:
            return ""
        if text:
            self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return what is left at the end; bytes that are no character become U+FFFD."""
        text, self._held = self._read_held(), []
        return text

    def _read_held(self) -> str:
        # At the beginning, the tokens themselves stand for what comes before them.
        before = self._before or self._held
        return self._decode([*before, *self._held])[len(self._decode(before)) :]


class StopFilter:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop string that has appeared."""
        self.stopped = False
        """Whether a stop string has appeared; text after it is dropped."""

    def push(self, piece: str) -> str:
        """Take ``piece`` and return the text that is certain."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            first, self.found = min(found)
            self.stopped = True
            self._held = ""
            return text[:first]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return what was held back, at the end."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of ``text`` that begins ``stop``."""
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0
