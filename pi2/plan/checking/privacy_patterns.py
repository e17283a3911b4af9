"""Patterns of what is private; compiled where a text gives reason to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Match = tuple[Literal["serial", "account", "home"], int, int]
"""The kind of a private stretch, its start and its end in the text."""

LABELLED_SERIAL = re.compile(
    r"(?<![\w-])(?:serial(?:[ _-]?(?:number|no|nr))?\.?|s/n|imei|meid|asset[ _-]?tag"
    r"|android[ _-]?id|udid)(?:\s*[:=#]\s*|\s+(?:is\s+)?)"
    r"(?P<found>[\"']?[A-Z0-9](?:[A-Z0-9:-]{4,38})[A-Z0-9][\"']?)(?![\w-])",
    re.IGNORECASE,
)
MAC = re.compile(
    r"(?<![\w:-])(?:[0-9A-Fa-f]{2}([:-]))(?:[0-9A-Fa-f]{2}\1){4}[0-9A-Fa-f]{2}(?![\w:-])"
)
UUID = re.compile(r"(?<![\w-])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![\w-])")
LONG_DIGITS = re.compile(r"(?<![\w.,-])\d{15}(?![\w.,-])")
PHONE_SERIAL = re.compile(
    r"(?<![\w/-])(?=(?:[A-Z]*\d){4})(?=(?:\d*[A-Z]){3})[A-Z0-9]{11,20}(?![\w/-])"
)

EMAIL = re.compile(
    r"(?<![\w.+/-])[\w.+-]{1,64}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}(?!\w)"
)
LOGIN = re.compile(
    r"(?<![\w-])(?:user(?:[ _-]?name)?|login|account|host[ _-]?name)\s*[:=]\s*"
    r"(?P<found>[\"']?[\w.@+-]{2,64}[\"']?)",
    re.IGNORECASE,
)
SHELL_PROMPT = re.compile(r"(?<![\w./@+-])[a-z_][\w-]{0,31}@[\w-]{2,63}(?=:[~/]|\s*[$#])")
URL_ACCOUNT = re.compile(r"(?<=://)[^/\s@\"']{1,200}@")
TOKEN = re.compile(r"(?<!\w)(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|glpat-[\w-]{20,})")

HOME = re.compile(
    r"(?<![\w.])(?:/home/|/Users/|/var/home/|[A-Za-z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))"
    r"(?P<found>[^\s/\\\"'<>|:*?,;)]{1,64})"
)

NOBODY = frozenset({"user", "username", "you", "me", "name", "$user", "<user>", "runner", "shared"})
"""Names that guides write where a reader puts their own."""


def find_matches(text: str) -> Iterator[Match]:
    """Every stretch of ``text`` that a pattern finds; some overlap."""
    for pattern in (LABELLED_SERIAL, MAC, UUID, LONG_DIGITS, PHONE_SERIAL):
        for match in pattern.finditer(text):
            if _is_serial(pattern, match):
                yield "serial", *_locate(match)
    for pattern in (EMAIL, LOGIN, SHELL_PROMPT, URL_ACCOUNT, TOKEN):
        for match in pattern.finditer(text):
            start, end = _locate(match)
            if text[start:end].lower() not in NOBODY:
                yield "account", start, end
    for match in HOME.finditer(text):
        if match["found"].lower() not in NOBODY:
            yield "home", *match.span()


def _locate(match: re.Match[str]) -> tuple[int, int]:
    """Where the private part stands, without quotes around it."""
    named: str | int = "found" if match.groupdict().get("found") else 0
    start, end = match.span(named)
    text: str = match[named]
    inner = text.strip("\"'")
    if inner != text and inner:
        start += text.index(inner)
        end = start + len(inner)
    return start, end


def _is_serial(pattern: re.Pattern[str], match: re.Match[str]) -> bool:
    if pattern is LABELLED_SERIAL:
        text: str = match["found"]
        return sum(char.isdigit() for char in text) >= 2
    if pattern is LONG_DIGITS:
        return _has_check_digit(match[0])
    return True


def _has_check_digit(digits: str) -> bool:
    """Whether the last digit is the check digit that an IMEI has (Luhn)."""
    total = 0
    for place, char in enumerate(reversed(digits)):
        value = int(char) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0
