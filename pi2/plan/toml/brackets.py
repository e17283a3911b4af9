"""Brackets of a TOML text: where one was opened, for texts that parsers refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""
      \"{3}(?:\\.|[^\\])*?\"{3}       # multi-line text
    | '{3}.*?'{3}
    | "(?:\\.|[^"\\\n])*"?            # text on one line, perhaps without its end
    | '[^'\n]*'?
    | \#[^\n]*
    | [\[\]{}]
    """,
    re.VERBOSE | re.DOTALL,
)


def _scan(text: str) -> Iterator[list[int]]:
    """Yield the offsets of the open brackets after each bracket."""
    stack: list[int] = []
    for token in _TOKEN.finditer(text):
        if token[0] in ("[", "{"):
            stack.append(token.start())
            yield stack
        elif token[0] in ("]", "}"):
            if stack:
                stack.pop()
            yield stack


def find_unclosed(text: str) -> int | None:
    """Offset of the innermost bracket that is still open at the end of ``text``."""
    last: list[int] = []
    for stack in _scan(text):
        last = stack
    return last[-1] if last else None


def find_depth(text: str, limit: int) -> int | None:
    """Offset of the first bracket that opens more than ``limit`` levels."""
    for stack in _scan(text):
        if len(stack) > limit:
            return stack[-1]
    return None
