"""Arguments that are written as a program's: ``f(a="x", b=[1, None])`` and ``f{a:<|"|>x<|"|>}``."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("|\Z)|[{}\[\]]', re.DOTALL)


def _refuse(name: str) -> None:
    raise ValueError(name)


_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse)
"""Models write line breaks into texts; NaN is no JSON."""


def find_json_end(text: str, start: int) -> int | None:
    """End of the object or list that begins at ``start``; None if it is not whole."""
    depth = 0
    for found in _PARTS.finditer(text, start):
        sign = found[0][0]
        if sign == '"':
            if found[1] != '"':
                return None
        elif sign in "{[":
            depth += 1
        else:
            depth -= 1
            if depth <= 0:
                return found.end()
    return None


def load_json(text: str) -> Any:
    """The value, None if it is none (or ``null``)."""
    try:
        return _LENIENT.decode(text)
    except (ValueError, RecursionError):
        return None


def dump_json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def keep_text(text: str, value: Any) -> str:
    """The JSON of ``value``: as it was written, if that is JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dump_json_text(value)
    return text


Schema = Mapping[str, Any]


def name_type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def read_value(text: str, types: Sequence[str]) -> Any:
    """The value of one of ``types`` that ``text`` stands for; without any, of the likeliest."""
    if not types:
        return _guess_value(text)
    if "null" in types and text.strip() in ("null", "None"):
        return None
    for name in types:
        found = _READERS.get(name, _read_text)(text.strip() if name != "string" else text)
        if found is not _NOTHING:
            return found
    return text


_NOTHING = object()


def _read_text(text: str) -> Any:
    return text


def _read_integer(text: str) -> Any:
    value = _read_number(text)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else _NOTHING


def _read_number(text: str) -> Any:
    value = load_json(text)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else _NOTHING


def _read_container(text: str, kind: type) -> Any:
    value = load_json(text)
    if isinstance(value, kind):
        return value
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOTHING
    return value if isinstance(value, kind) else _NOTHING


_READERS: Mapping[str, Callable[[str], Any]] = {
    "string": _read_text,
    "integer": _read_integer,
    "number": _read_number,
    "boolean": lambda text: {"true": True, "false": False}.get(text.lower(), _NOTHING),
    "null": lambda text: None if text in ("null", "None") else _NOTHING,
    "object": lambda text: _read_container(text, dict),
    "array": lambda text: _read_container(text, list),
}


def _guess_value(text: str) -> Any:
    """A parameter without a stated type: JSON if it is other than a text, else the text."""
    value = load_json(text)
    return text if value is None and text.strip() != "null" or isinstance(value, str) else value


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


Item = TypeVar("Item")


class Literals:
    """Reads values from a place in a text; raises `NotWhole` or `NoCall`."""

    def __init__(self, text: str, at: int, quote: str | None = None) -> None:
        """``quote``: the mark around texts, instead of quotes."""
        self._text = text
        self.at = at
        """Offset of the next value."""
        self._quote = quote

    def read_pairs(self, between: str, close: str) -> dict[str, Any]:
        """Names and values up to ``close``, which is taken; ``between`` stands between both."""
        return dict(self._read_items(close, lambda: self._read_pair(between, 1)))

    def _skip(self) -> str:
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

    def _read_items(self, close: str, read_item: Callable[[], Item]) -> Iterator[Item]:
        """Items up to ``close``, which is taken, with commas between them."""
        is_first = True
        while not self._take(close):
            if not is_first:
                if not self._take(","):
                    raise NoCall
                if self._take(close):
                    return
            is_first = False
            yield read_item()

    def _read_pair(self, between: str, depth: int) -> tuple[str, Any]:
        key = self._read_key()
        if not self._take(between):
            raise NoCall
        return key, self._read_value(depth)

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
        if sign in "{[(":
            self.at += 1
            if sign == "{":
                return dict(self._read_items("}", lambda: self._read_pair(":", depth + 1)))
            close = "]" if sign == "[" else ")"
            return list(self._read_items(close, lambda: self._read_value(depth + 1)))
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
        """End of the text that begins at ``start``: a mark after which a value can end."""
        assert self._quote is not None
        at = self._text.find(self._quote, start)
        while at >= 0:
            if self._can_end(at + len(self._quote)):
                return at
            at = self._text.find(self._quote, at + 1)
        raise NotWhole


def write_literal(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{write_literal(key)}: {write_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(write_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
