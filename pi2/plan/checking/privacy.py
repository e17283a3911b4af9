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

from pi2.plan.checking.figures import walk_texts
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.toml.source import KINDS

PrivateKind = Literal["serial", "account", "home"]

_HINT = re.compile(
    r"@|/home/|[Uu]sers|[A-Z0-9]{11}|[0-9A-Fa-f]{8}-|[0-9A-Fa-f]{2}[:-][0-9A-Fa-f]{2}[:-]|_\w{20}"
    r"|glpat-|(?i:serial|s/n|imei|meid|asset|android|udid|user|login|account|host[ _-]?name)"
)
"""A pattern that every private text matches; most texts do not and need no further look."""

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
        """The beginning of the stretch: enough to find it again, not enough to give it away."""
        return f"{self.text[:3]}…" if self.kind != "home" else self.text[:32]


@lru_cache(maxsize=4096)  # three rules ask about the same texts
def find_private(text: str) -> tuple[Private, ...]:
    """Everything private in ``text``, in its order; stretches do not overlap."""
    if _HINT.search(text) is None:
        return ()
    from pi2.plan.checking.privacy_patterns import find_matches

    matches = sorted(find_matches(text), key=lambda item: (item[1], -item[2]))
    found = [Private(kind=k, start=i, end=j, text=text[i:j]) for k, i, j in matches]
    kept: list[Private] = []
    for item in found:
        if not kept or item.start >= kept[-1].end:
            kept.append(item)
    return tuple(kept)


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
