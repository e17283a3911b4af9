"""How byte-pair tokenizers of GGUF files cut text (``tokenizer.ggml.pre``)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tokenizer cuts text into words."""

    expressions: tuple[str, ...]
    """In the order in which they are applied."""
    whole_words: bool = False
    """Whether a word that is a token is taken whole, before any merges."""
    begins: bool = False
    """Whether texts get a begin token unless the file says otherwise."""
    always_begins: bool = False
    """Whether they get one though the file says otherwise, as Gemma 4's files do."""
    bytes_as_letters: bool = True
    """Whether tokens are written with a letter for each byte, as GPT-2's; else they are text, with
    U+2581 for a space, and bytes have tokens of their own."""


_TABLE: Mapping[str, Any] = tomli.loads(
    Path(__file__).with_name("text_cuts.toml").read_text("utf-8")  # importlib.resources takes 10 ms
)


def _write_ranges(ranges: str) -> str:
    """Characters of an expression's class: ``A-F 1E`` as its syntax has them."""
    return re.sub("[0-9A-F]+", r"\\x{\g<0>}", ranges).replace(" ", "")


def _fill(expression: str) -> str:
    """An expression with its parts in place of their names."""

    def find(name: re.Match[str]) -> str:
        ranges = _TABLE["ranges"].get(name[1])
        return _fill(_TABLE["parts"][name[1]]) if ranges is None else _write_ranges(ranges)

    return re.sub("<([a-z0-9_]+)>", find, expression)


def _read_cuts() -> Mapping[str, Cut]:
    found: dict[str, Cut] = {}
    for table in _TABLE["cuts"]:
        flags = {key: value for key, value in table.items() if key not in ("names", "expressions")}
        cut = Cut(tuple(map(_fill, table["expressions"])), **flags)
        found |= dict.fromkeys(table["names"], cut)
    return found


CUTS = _read_cuts()
"""By the name that a file has for it."""


def write_expression(expression: str) -> str:
    """An expression of a cut for the tokenizer library, whose Unicode is newer than llama.cpp's."""

    def write(found: re.Match[str]) -> str:
        return rf"[\p{{{found[1]}}}&&[^{_write_ranges(_TABLE['later'][found[1]])}]]"

    return re.sub(r"\\p\{([LNMPS])\}", write, expression)
