"""A page about a code: what the finding means, why it matters, an example, and how to fix it.

Pages are written as the docstrings of rules are::

    The shares of a split add up to 1.

    Why: every neuron of a layer is computed exactly once, by one unit.

    Example: ``split = { cpu = 0.3, npu = 0.8 }``.

    Fix: change one of the shares; 0 leaves a unit out.

Such a text and its Markdown (single backticks) say the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

SECTIONS = ("Why", "Example", "Fix")

_HEADING = re.compile(rf"^({'|'.join(SECTIONS)}): *", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What there is to say about one code; texts are Markdown, a line per paragraph."""

    code: str
    what: str
    """One sentence, with a full stop."""
    why: str
    example: str
    fix: str

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Headings and texts after the first sentence."""
        return tuple(zip(SECTIONS, (self.why, self.example, self.fix), strict=True))


FindPage = Callable[[str], Page | None]
"""Looks up the page of a code."""


def parse_page(code: str, text: str) -> Page:
    """Read a page; a text without one of the sections is a programmer's mistake."""
    what, *parts = _HEADING.split(text.replace("``", "`"))
    assert tuple(parts[::2]) == SECTIONS, f"{code}: expected {SECTIONS}, got {parts[::2]}"
    why, example, fix = (_join_lines(part) for part in parts[1::2])
    return Page(code=code, what=_join_lines(what), why=why, example=example, fix=fix)


def write_markdown(page: Page) -> str:
    """The page as a section of a Markdown document."""
    parts = [f"## {page.code}", page.what]
    for heading, text in page.sections:
        parts.append(f"**{heading}:** {begin_sentence(text)}")
    return "\n\n".join(parts) + "\n"


def begin_sentence(text: str) -> str:
    """The text of a section where it does not follow its heading's colon."""
    return text[:1].upper() + text[1:]


def _join_lines(text: str) -> str:
    """One line per paragraph, without blanks around."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
