"""Arguments that are written as a program's: ``f(a="x", b=[1, None])`` and ``f{a:<|"|>x<|"|>}``."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)")
_QUOTED = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""|'
    r"'''(?:[^'\\]|\\.|'(?!''))*'''|"
    r'"(?:[^"\\]|\\.)*"|'
    r"'(?:[^'\\]|\\.)*'",
    re.DOTALL,
)
_WORDS = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
    "nil": None,
}
_MOST_DEPTH = 64
_AFTER = ",)]}:"
"""What follows a value or a key."""


class NotWhole(Exception):
    """The text may go on to be a call."""


class NoCall(Exception):
    """The text is no call."""


class Literals:
    """Reads values from a place in a text; `NotWhole` where it ends too early, `NoCall` where it is
    no value."""

    def __init__(self, text: str, at: int, quote: str | None = None) -> None:
        """``quote``: the mark around texts, instead of quotes."""
        self._text = text
        self.at = at
        """Where it goes on."""
        self._quote = quote

    def read_pairs(self, between: str, close: str) -> dict[str, Any]:
        """Names and values up to ``close``, which is taken; ``between`` stands between both."""
        return self._read_items(between, close, 0)

    def _skip(self) -> str:
        """The next character that is no white space."""
        text = self._text
        while self.at < len(text) and text[self.at].isspace():
            self.at += 1
        if self.at == len(text):
            raise NotWhole
        return text[self.at]

    def _take(self, sign: str) -> bool:
        if self._skip() != sign:
            return False
        self.at += 1
        return True

    def _read_items(self, between: str, close: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._take(close):
            if found:
                if not self._take(","):
                    raise NoCall
                if self._take(close):
                    break
            key = self._read_key()
            if not self._take(between):
                raise NoCall
            found[key] = self._read_value(depth + 1)
        return found

    def _read_key(self) -> str:
        sign = self._skip()
        if sign in "\"'" or self._starts_quote():
            return self._read_text()
        found = _NAME.match(self._text, self.at)
        if found is None:
            raise NoCall
        self.at = found.end()
        return found[0]

    def _starts_quote(self) -> bool:
        quote = self._quote
        if quote is None:
            return False
        rest = self._text[self.at : self.at + len(quote)]
        if rest != quote and quote.startswith(rest):
            raise NotWhole
        return rest == quote

    def _read_value(self, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise NoCall
        sign = self._skip()
        if self._starts_quote() or sign in "\"'":
            return self._read_text()
        if sign == "{":
            self.at += 1
            return self._read_items(":", "}", depth)
        if sign in "[(":
            self.at += 1
            close = "]" if sign == "[" else ")"
            values: list[Any] = []
            while not self._take(close):
                if values:
                    if not self._take(","):
                        raise NoCall
                    if self._take(close):
                        break
                values.append(self._read_value(depth + 1))
            return values
        for pattern in (_NUMBER, _NAME):
            found = pattern.match(self._text, self.at)
            if found is not None:
                return self._end_word(found)
        if sign in "+-." and self.at + 1 == len(self._text):
            raise NotWhole
        raise NoCall

    def _end_word(self, found: re.Match[str]) -> Any:
        if found.end() == len(self._text):
            raise NotWhole
        self.at = found.end()
        word = found[0]
        if word in _WORDS:
            return _WORDS[word]
        try:
            number = ast.literal_eval(word.lstrip("+"))
        except (ValueError, SyntaxError):
            raise NoCall from None
        return number

    def _read_text(self) -> str:
        text = self._text
        if self._starts_quote():
            assert self._quote is not None
            start = self.at + len(self._quote)
            end = self._find_quote_end(start)
            self.at = end + len(self._quote)
            return text[start:end]
        found = _QUOTED.match(text, self.at)
        if found is None:
            raise NotWhole
        end, sign = found.end(), text[self.at]
        while not self._can_end(end):
            # A quote within the text that was not escaped.
            end = text.find(sign, end) + 1
            if not end:
                raise NotWhole
        written = text[self.at : end]
        self.at = end
        for tried in (written, sign * 2 + written + sign * 2):
            try:
                value = ast.literal_eval(tried)
            except (ValueError, SyntaxError):
                continue
            assert isinstance(value, str)
            return value
        return written[1:-1]

    def _can_end(self, at: int) -> bool:
        """Whether a value can end at a place; `NotWhole` if the text ends there."""
        rest = self._text[at : at + 64].lstrip()
        if not rest:
            raise NotWhole
        return rest[0] in _AFTER

    def _find_quote_end(self, start: int) -> int:
        """Where the text ends that begins at ``start``: at a mark after which a value can end."""
        assert self._quote is not None
        at = self._text.find(self._quote, start)
        while at >= 0:
            if self._can_end(at + len(self._quote)):
                return at
            at = self._text.find(self._quote, at + 1)
        raise NotWhole


def write_literal(value: Any) -> str:
    """A value as Python writes it, its texts in double quotes."""
    if isinstance(value, dict):
        items = (f"{write_literal(key)}: {write_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(write_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
