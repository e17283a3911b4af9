"""What in a text speaks of one machine or one person: serial numbers, accounts, home folders.

The patterns are made to be right where they speak rather than to find everything: a text is a
source, a name or a comment, and most of those are of nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pi2.plan.figures import walk_texts
from pi2.plan.findings import Facts, Finding
from pi2.plan.source import KINDS

PrivateKind = Literal["serial", "account", "home"]

_LABELLED_SERIAL = re.compile(
    r"(?<![\w-])(?:serial(?:[ _-]?(?:number|no|nr))?\.?|s/n|imei|meid|asset[ _-]?tag"
    r"|android[ _-]?id|udid)(?:\s*[:=#]\s*|\s+(?:is\s+)?)"
    r"(?P<found>[\"']?[A-Z0-9](?:[A-Z0-9:-]{4,38})[A-Z0-9][\"']?)(?![\w-])",
    re.IGNORECASE,
)
_MAC = re.compile(
    r"(?<![\w:-])(?:[0-9A-Fa-f]{2}([:-]))(?:[0-9A-Fa-f]{2}\1){4}[0-9A-Fa-f]{2}(?![\w:-])"
)
_UUID = re.compile(r"(?<![\w-])[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}(?![\w-])")
_LONG_DIGITS = re.compile(r"(?<![\w.,-])\d{15}(?![\w.,-])")
_PHONE_SERIAL = re.compile(
    r"(?<![\w/-])(?=(?:[A-Z]*\d){4})(?=(?:\d*[A-Z]){3})[A-Z0-9]{11,20}(?![\w/-])"
)

_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}(?!\w)"
)
_LOGIN = re.compile(
    r"(?<![\w-])(?:user(?:[ _-]?name)?|login|account|host[ _-]?name)\s*[:=]\s*"
    r"(?P<found>[\"']?[\w.@+-]{2,64}[\"']?)",
    re.IGNORECASE,
)
_SHELL_PROMPT = re.compile(r"(?<![\w./@+-])[a-z_][\w-]{0,31}@[\w-]{2,63}(?=:[~/]|\s*[$#])")
_URL_ACCOUNT = re.compile(r"(?<=://)[^/\s@\"']{1,200}@")
_TOKEN = re.compile(r"(?<!\w)(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|glpat-[\w-]{20,})")

_HOME = re.compile(
    r"(?<![\w.])(?:/home/|/Users/|/var/home/|[A-Za-z]:(?:\\{1,2}|/)Users(?:\\{1,2}|/))"
    r"(?P<found>[^\s/\\\"'<>|:*?,;)]{1,64})"
)

_NOBODY = frozenset(
    {"user", "username", "you", "me", "name", "$user", "<user>", "runner", "shared"}
)
"""Names that guides write where a reader puts their own."""

_PLACEHOLDER = {"serial": "(serial number)", "account": "(account)", "home": "~"}


@dataclass(frozen=True, kw_only=True)
class Private:
    """A private stretch of a text."""

    kind: PrivateKind
    start: int
    end: int
    text: str

    @property
    def shortened(self) -> str:
        """Enough of it to find it again, not enough to give it away."""
        return f"{self.text[:3]}…" if self.kind != "home" else self.text[:32]


@lru_cache(maxsize=4096)  # three rules ask about the same texts
def find_private(text: str) -> tuple[Private, ...]:
    """Everything private in ``text``, in its order; stretches do not overlap."""
    found = sorted(_find_all(text), key=lambda item: (item.start, -item.end))
    kept: list[Private] = []
    for item in found:
        if not kept or item.start >= kept[-1].end:
            kept.append(item)
    return tuple(kept)


def _find_all(text: str) -> Iterator[Private]:
    if len(text) < 5:
        return
    for pattern in (_LABELLED_SERIAL, _MAC, _UUID, _LONG_DIGITS, _PHONE_SERIAL):
        for match in pattern.finditer(text):
            if _is_serial(pattern, match):
                yield _make("serial", match)
    if "@" in text or ":" in text or "=" in text or "_" in text or "-" in text:
        for pattern in (_EMAIL, _LOGIN, _SHELL_PROMPT, _URL_ACCOUNT, _TOKEN):
            for match in pattern.finditer(text):
                name = match.groupdict().get("found") or match[0]
                if name.strip("\"'").lower() not in _NOBODY:
                    yield _make("account", match)
    for match in _HOME.finditer(text):
        if match["found"].lower() not in _NOBODY:
            yield Private(kind="home", start=match.start(), end=match.end(), text=match[0])


def _make(kind: PrivateKind, match: re.Match[str]) -> Private:
    named = "found" if match.groupdict().get("found") else 0
    start, end = match.span(named)
    text = match[named]
    if text[:1] in "\"'" and text[-1:] == text[:1] and len(text) > 2:
        start, end, text = start + 1, end - 1, text[1:-1]
    return Private(kind=kind, start=start, end=end, text=text.strip("\"'"))


def _is_serial(pattern: re.Pattern[str], match: re.Match[str]) -> bool:
    if pattern is _LABELLED_SERIAL:
        text: str = match["found"]
        return sum(char.isdigit() for char in text) >= 2
    if pattern is _LONG_DIGITS:
        return _has_check_digit(match[0])
    return True


def _has_check_digit(digits: str) -> bool:
    """Whether the last digit is the check digit that an IMEI has (Luhn)."""
    total = 0
    for place, char in enumerate(reversed(digits)):
        value = int(char) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def strip_private(text: str) -> tuple[str, tuple[Private, ...]]:
    """The text without what is private, and what that was."""
    found = find_private(text)
    for item in reversed(found):
        text = text[: item.start] + _PLACEHOLDER[item.kind] + text[item.end :]
    return text, found


def report_private(facts: Facts, kind: PrivateKind, what: str) -> Iterator[Finding]:
    """A finding for every text of the documents that holds something private of this kind."""
    for document in KINDS:
        for path, text in walk_texts(facts.known.get(document)):
            found = [item for item in find_private(text) if item.kind == kind]
            if found:
                yield Finding(
                    document=document,
                    path=path,
                    message=f"{what}: `{found[0].shortened}`",
                    help="leave it out: documents are shared",
                )
