"""Count patterns of prose in pi2's texts, and lower their limits in tests/prose.toml.

python tools/check_prose.py              # counts and limits
python tools/check_prose.py --show NAME  # every place of a pattern
python tools/check_prose.py --lower      # limits become the counts, if these are lower
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import click

from pi2.cli.main import LazyGroup

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests/prose.toml"
KINDS = ("documents", "help", "messages", "schemas", "docstrings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pattern of words, or a longest sentence, with its limit in each kind of text."""

    name: str
    example: str
    instead: str
    regex: str = ""
    words: int = 0
    limits: Mapping[str, int]

    def find(self, text: str) -> list[str]:
        """What of ``text`` matches, with some words around it."""
        if self.words:
            return [item for item in split_sentences(text) if len(item.split()) > self.words]
        found = re.finditer(self.regex, text, re.IGNORECASE | re.MULTILINE)
        return [text[max(item.start() - 40, 0) : item.end() + 40] for item in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A piece of prose and where it stands."""

    place: str
    prose: str


def read_patterns() -> list[Pattern]:
    """The patterns of `FILE`."""
    values: dict[str, Any] = tomllib.loads(FILE.read_text("utf-8"))
    return [Pattern(**item) for item in values["patterns"]]


@lru_cache
def read_texts() -> Mapping[str, tuple[Text, ...]]:
    """Texts by kind."""
    makers = (list_documents, list_help, list_messages, list_schemas, list_docstrings)
    return {kind: tuple(make()) for kind, make in zip(KINDS, makers, strict=True)}


def list_documents() -> Iterator[Text]:
    """Pages that people wrote, without code; a row of a table is a line."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notes/*.md")]
    for page in sorted(pages):
        text = page.read_text("utf-8")
        if "<!-- Written by" not in text:
            yield Text(place=str(page.relative_to(ROOT)), prose=clean_markdown(text))


def clean_markdown(text: str) -> str:
    """Paragraphs in a line each, without code, links' targets and generated tables."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", text)
    text = re.sub(r"(?ms)^<!-- [\w: -]+ -->.*?<!-- [\w: -]*end -->$", "", text)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    text = re.sub(r"(?m)^(#.*|\|.*)$", r"\1\n", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return "\n".join(" ".join(item.split()) for item in paragraphs if item.strip())


def list_help() -> Iterator[Text]:
    """The help of every command and option."""
    group = LazyGroup()
    around = click.Context(group)
    waiting = [(name, group.get_command(around, name)) for name in group.list_commands(around)]
    for path, command in waiting:
        assert command is not None, path
        texts = [
            command.help or "",
            *(getattr(item, "help", None) or "" for item in command.params),
        ]
        yield Text(place=f"pi2 {path}", prose="\n".join(" ".join(text.split()) for text in texts))
        if isinstance(command, click.Group):
            waiting += [(f"{path} {name}", item) for name, item in command.commands.items()]


def list_messages() -> Iterator[Text]:
    """Strings of the product that have words, without docstrings; explanations of codes."""
    for path, nodes in list_modules():
        documents = {id(item.value) for item in list_string_statements(nodes)}
        strings = [
            item.value
            for item in nodes
            if isinstance(item, ast.Constant) and isinstance(item.value, str)
            if id(item) not in documents and len(item.value.split()) > 2
        ]
        yield Text(place=path, prose="\n".join(" ".join(item.split()) for item in strings))
    for page in sorted(ROOT.glob("pi2/diagnostics/pages/*.toml")):
        yield Text(place=str(page.relative_to(ROOT)), prose=page.read_text("utf-8"))


def list_schemas() -> Iterator[Text]:
    """Descriptions in the schemas, which editors show."""
    for path in sorted(ROOT.glob("schemas/*.json")):
        found: list[str] = []
        waiting: list[Any] = [json.loads(path.read_text("utf-8"))]
        for item in waiting:
            if isinstance(item, dict):
                text = item.get("description")
                found += [text] if isinstance(text, str) else []
                waiting += item.values()
            elif isinstance(item, list):
                waiting += item
        yield Text(place=path.name, prose="\n".join(found))


def list_docstrings() -> Iterator[Text]:
    """Docstrings of the product's modules, classes, functions and fields."""
    for path, nodes in list_modules():
        texts = [item.value.value for item in list_string_statements(nodes)]
        paragraphs = [part for text in texts for part in re.split(r"\n\s*\n", str(text))]
        yield Text(place=path, prose="\n".join(" ".join(item.split()) for item in paragraphs))


@lru_cache
def list_modules() -> tuple[tuple[str, list[ast.AST]], ...]:
    """Constants, and statements that are an expression, of the product's modules by path."""
    paths = [*ROOT.glob("pi2/**/*.py"), *ROOT.glob("backends/**/*.py")]
    own = sorted({path for path in paths if not path.is_relative_to(ROOT / "pi2/backends")})
    trees = ((str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))) for path in own)
    kinds = ast.Constant, ast.Expr
    return tuple(
        (path, [item for item in ast.walk(tree) if isinstance(item, kinds)]) for path, tree in trees
    )


def list_string_statements(nodes: list[ast.AST]) -> list[Any]:
    """Statements that are a string: docstrings of all kinds."""
    return [
        item
        for item in nodes
        if isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    ]


def split_sentences(text: str) -> Iterator[str]:
    """Sentences of all lines but those of tables."""
    for line in text.splitlines():
        if not line.startswith("|"):
            yield from re.split(r"(?<=[.!?:;])\s+", line)


def count(pattern: Pattern, kind: str) -> int:
    """Number of places of a pattern in a kind of text."""
    return sum(len(pattern.find(text.prose)) for text in read_texts()[kind])


def lower_limits(patterns: list[Pattern]) -> None:
    """Write limits that are no higher than the counts into `FILE`."""
    lines = iter(
        "limits = { "
        + ", ".join(
            f"{kind} = {min(count(pattern, kind), pattern.limits.get(kind, sys.maxsize))}"
            for kind in KINDS
        )
        + " }"
        for pattern in patterns
    )
    text = FILE.read_text("utf-8")
    FILE.write_text(re.sub(r"(?m)^limits = .*$", lambda _: next(lines), text), "utf-8")


def main() -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", metavar="NAME", help="print every place of a pattern")
    parser.add_argument("--kind", choices=KINDS, help="only in texts of this kind")
    parser.add_argument("--lower", action="store_true", help="lower limits to the counts")
    options = parser.parse_args()
    patterns = read_patterns()
    if options.lower:
        lower_limits(patterns)
        patterns = read_patterns()
    exceeded = 0
    for pattern in patterns:
        if options.show not in (None, pattern.name):
            continue
        for kind in KINDS if options.kind is None else (options.kind,):
            number, limit = count(pattern, kind), pattern.limits.get(kind, 0)
            exceeded += number > limit
            print(f"{pattern.name:16} {kind:10} {number:5} of {limit}")
            for text in read_texts()[kind] if options.show else ():
                for place in pattern.find(text.prose):
                    print(f"    {text.place}: {place}")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
