"""Values of documents one by one, and private data in their texts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pydantic import BaseModel

from pi2.plan.documents.common import Origin
from pi2.plan.toml.text import KeyPath


def walk_figures(value: object) -> Iterator[tuple[KeyPath, Origin]]:
    """Every figure below ``value`` with its key path."""
    for place, item in walk_values(value, ()):
        if isinstance(item, Origin):
            yield place, item


def walk_values(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """``value`` and everything below it, including values that are not stated."""
    yield path, value
    if isinstance(value, BaseModel):
        for name, item in value:
            yield from walk_values(item, (*path, name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk_values(item, (*path, str(key)))
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from walk_values(item, (*path, number))


PrivateKind = Literal["serial", "account", "home"]


@dataclass(frozen=True, kw_only=True)
class Private:
    """A private piece of a text."""

    kind: PrivateKind
    start: int
    end: int
    text: str

    @property
    def shortened(self) -> str:
        """The beginning of the piece: enough to find it again, and not enough to give it away."""
        return f"{self.text[:3]}…" if self.kind != "home" else self.text[:32]


# Compiled by their first text: few have any.
LABELLED_SERIAL = (
    r"(?i)(?<![\w-])(?:serial(?:[ _-]?(?:number|no|nr))?\.?|s/n|imei|meid|asset[ _-]?tag"
    r"|android[ _-]?id|udid)(?:\s*[:=#]\s*|\s+(?:is\s+)?)"
    r"(?P<found>[\"']?[A-Z0-9](?:[A-Z0-9:-]{4,38})[A-Z0-9][\"']?)(?![\w-])"
)
MAC = r"(?<![\w:-])(?:[0-9A-Fa-f]{2}([:-]))(?:[0-9A-Fa-f]{2}\1){4}[0-9A-Fa-f]{2}(?![\w:-])"
UUID = r"(?<![\w-])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![\w-])"
LONG_DIGITS = r"(?<![\w.,-])\d{15}(?![\w.,-])"
PHONE_SERIAL = r"(?<![\w/-])(?=(?:[A-Z]*\d){4})(?=(?:\d*[A-Z]){3})[A-Z0-9]{11,20}(?![\w/-])"

EMAIL = r"(?<![\w.+/-])[\w.+-]{1,64}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}(?!\w)"
LOGIN = (
    r"(?i)(?<![\w-])(?:user(?:[ _-]?name)?|login|account|host[ _-]?name)\s*[:=]\s*"
    r"(?P<found>[\"']?[\w.@+-]{2,64}[\"']?)"
)
SHELL_PROMPT = r"(?<![\w./@+-])[a-z_][\w-]{0,31}@[\w-]{2,63}(?=:[~/]|\s*[$#])"
URL_ACCOUNT = r"(?<=://)[^/\s@\"']{1,200}@"
TOKEN = r"(?<!\w)(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|glpat-[\w-]{20,})"

HOME = (
    r"(?<![\w.])(?:/home/|/Users/|/var/home/|[A-Za-z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))"
    r"(?P<name>[^\s/\\\"'<>|:*?,;)]{1,64})"
)

NOBODY = frozenset({"user", "username", "you", "me", "name", "$user", "<user>", "runner", "shared"})
"""Names that guides write where a reader puts their own."""


_PATTERNS: tuple[tuple[PrivateKind, str], ...] = (
    *(("serial", p) for p in (LABELLED_SERIAL, MAC, UUID, LONG_DIGITS, PHONE_SERIAL)),
    *(("account", p) for p in (EMAIL, LOGIN, SHELL_PROMPT, URL_ACCOUNT, TOKEN)),
    ("home", HOME),
)


def find_matches(text: str) -> Iterator[Private]:
    """Every piece of ``text`` that a pattern finds; some overlap."""
    for kind, pattern in _PATTERNS:
        for match in re.finditer(pattern, text):
            start, end = _locate(match)
            piece = text[start:end]
            if kind == "serial":
                is_private = _is_serial(pattern, match)
            else:
                name = match["name"] if kind == "home" else piece
                is_private = name.lower() not in NOBODY
            if is_private:
                yield Private(kind=kind, start=start, end=end, text=piece)


def _locate(match: re.Match[str]) -> tuple[int, int]:
    named: str | int = "found" if match.groupdict().get("found") else 0
    start, end = match.span(named)
    text: str = match[named]
    inner = text.strip("\"'")
    if inner != text and inner:
        start += text.index(inner)
        end = start + len(inner)
    return start, end


def _is_serial(pattern: str, match: re.Match[str]) -> bool:
    if pattern is LABELLED_SERIAL:
        text: str = match["found"]
        return sum(char.isdigit() for char in text) >= 2
    if pattern is LONG_DIGITS:
        return _has_check_digit(match[0])
    return True


def _has_check_digit(digits: str) -> bool:
    total = 0
    for place, char in enumerate(reversed(digits)):
        value = int(char) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


_HINT = re.compile(
    r"@|/home/|[Uu]sers|[A-Z0-9]{11}|[0-9A-Fa-f]{8}-|[0-9A-Fa-f]{2}[:-][0-9A-Fa-f]{2}[:-]|_\w{20}"
    r"|glpat-|(?i:serial|s/n|imei|meid|asset|android|udid|user|login|account|host[ _-]?name)"
)
"""A pattern that every private text matches; most texts do not and need no further look."""

_PLACEHOLDER = {"serial": "(serial number)", "account": "(account)", "home": "~"}


@lru_cache(maxsize=4096)  # three rules ask about the same texts
def find_private(text: str) -> tuple[Private, ...]:
    """Every private piece of ``text`` in order; pieces do not overlap."""
    if _HINT.search(text) is None:
        return ()
    kept: list[Private] = []
    for item in sorted(find_matches(text), key=lambda item: (item.start, -item.end)):
        if not kept or item.start >= kept[-1].end:
            kept.append(item)
    return tuple(kept)


def strip_private(text: str) -> tuple[str, tuple[Private, ...]]:
    """The text without its private pieces, and these pieces."""
    found = find_private(text)
    for item in reversed(found):
        text = text[: item.start] + _PLACEHOLDER[item.kind] + text[item.end :]
    return text, found
