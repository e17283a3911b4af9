"""Formats of answers: how families of models mark reasoning and write calls of tools.

A format is a table in ``formats/*.toml``, all of which are listed: another family needs a table
there.  It is known by marks in the chat template, or in the vocabulary: the template says how
earlier calls are written, and the model was trained to write its own in the same way.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pi2.serving.call_patterns import CallForm
from pi2.serving.json_text import dump_json_text

Pair = tuple[str, str]
"""What a part of an answer begins and ends with."""
_DEFAULT = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a family marks the parts of an answer."""

    name: str
    known_by: Sequence[Sequence[str]] = ()
    """Sets of marks: one of them stands in the template, or partly in the vocabulary."""
    template_has: Sequence[str] = ()
    """What else stands in the template."""
    calls: Sequence[CallForm] = ()
    """How calls are written, and the other ways in which they are read."""
    reasoning: Sequence[Pair] = ()
    content: Sequence[Pair] = ()
    """Marks around what is said to the user."""
    skip: Sequence[str] = ()
    """What says nothing between the parts."""
    is_loose: bool = False
    """Whether a known tool's call is read without marks: an answer that begins with it, and a code
    fence that holds it."""
    is_channels: bool = False
    """Whether every message has a channel, as gpt-oss writes them."""

    def _score(self, template: str, vocabulary: Iterable[str]) -> tuple[int, int, int]:
        """How surely it is known: marks in the template, all marks, and their length."""
        if not all(mark in template for mark in self.template_has):
            return (0, 0, 0)
        best = (0, 0, 0)
        for marks in self.known_by:
            if all(mark in template or mark in vocabulary for mark in marks):
                more = self.template_has
                seen = sum(mark in template for mark in marks) + len(more)
                length = sum(map(len, (*marks, *more)))
                best = max(best, (seen, len(marks) + len(more), length))
        return best


@cache
def list_formats() -> Sequence[Format]:
    """All formats, read once."""
    folder = resources.files("pi2.serving") / "formats"
    tables = [
        table
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
        for table in tomllib.loads(file.read_text("utf-8"))["formats"]
    ]
    return [_read_format(table) for table in tables]


def _read_format(table: Mapping[str, Any]) -> Format:
    values = dict(table)
    for key in ("reasoning", "content"):
        values[key] = [(begin, end) for begin, end in table.get(key, ())]
    values["calls"] = [CallForm(**form) for form in table.get("calls", ())]
    return Format(**values)


def find_format(template: str, vocabulary: Iterable[str] = ()) -> Format:
    """The format of the family that has this chat template and these added tokens."""
    formats = list_formats()
    best = max(formats, key=lambda found: found._score(template, vocabulary))
    if best._score(template, vocabulary) > (0, 0, 0):
        return best
    return next(found for found in formats if found.name == _DEFAULT)


def find_pairs(template: str, vocabulary: Iterable[str]) -> list[Pair]:
    """Marks of reasoning that stand in a template or a vocabulary."""
    pairs = dict.fromkeys(pair for found in list_formats() for pair in found.reasoning)
    return [
        pair
        for pair in pairs
        if pair[0] in template or pair[1] in template or pair[1] in vocabulary
    ]


def list_call_forms(format: Format) -> list[tuple[CallForm, bool]]:
    """How calls are read that begin with one of the format's marks, and whether the way is the
    format's own."""
    own = [(form, True) for form in format.calls]
    begins = {form.begin for form in format.calls if form.begin}
    others = [
        (form, False)
        for other in list_formats()
        for form in other.calls
        if other.name != format.name and form.begin in begins and not other.is_channels
    ]
    return own + others


def knows_tools(template: str) -> bool:
    """Whether a chat template tells the model of tools."""
    return re.search(r"\btools\b", template) is not None


def describe_tools(format: Format, tools: Sequence[Mapping[str, Any]]) -> str:
    """What to tell a model of tools whose chat template does not."""
    listed = "\n".join(dump_json_text(tool) for tool in tools)
    example = format.calls[0].write([("NAME", {"PARAMETER": "VALUE"})])
    return (
        "You can call functions. Their signatures as JSON:\n"
        f"{listed}\n"
        f"To call one, write nothing but\n{example}"
    )
