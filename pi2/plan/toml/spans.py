"""The place of every key and its value in a TOML text, from a tree-sitter parse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import tomli

from pi2.diagnostics import Diagnostic, Span
from pi2.plan.toml.text import KeyPath, format_path

if TYPE_CHECKING:
    from tree_sitter import Node


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


_KEY_TYPES = frozenset({"bare_key", "quoted_key", "dotted_key"})


@dataclass(frozen=True)
class Duplicate:
    """A key that stands twice in one table."""

    path: KeyPath
    first: Span
    second: Span


@dataclass(slots=True)
class SpanIndex:
    file: str
    keys: dict[KeyPath, Span] = field(default_factory=dict)
    """The key's own characters; for an array's item, the item."""
    values: dict[KeyPath, Span] = field(default_factory=dict)
    """The value's characters; for a table with a header, the header."""
    duplicates: list[Duplicate] = field(default_factory=list)
    headers: set[KeyPath] = field(default_factory=set)
    """Tables that begin with a [header] or [[header]]."""
    errors: list[Span] = field(default_factory=list)
    """Text that TOML 1.0's grammar does not have."""

    def has(self, path: KeyPath) -> bool:
        """Whether the text has the key; the document itself counts as there."""
        return not path or path in self.keys

    def has_header(self, path: KeyPath) -> bool:
        return path in self.headers

    def find_key(self, path: KeyPath) -> Span:
        return self.keys[path] if path in self.keys else self.find_table(path[:-1])

    def find_value(self, path: KeyPath) -> Span:
        return self.values[path] if path in self.values else self.find_key(path)

    def find_table(self, path: KeyPath) -> Span:
        while path:
            spans = self.values if path in self.headers else self.keys
            if path in spans:
                return spans[path]
            path = path[:-1]
        return Span.of_file(self.file)

    def alias(self, new: KeyPath, old: KeyPath) -> None:
        """Let ``new`` stand where ``old`` stands."""
        for spans in (self.keys, self.values):
            if old in spans:
                spans[new] = spans[old]

    def replace(self, path: KeyPath, key: Span, value: Span) -> None:
        """Let ``path`` and everything below it stand elsewhere."""
        for spans in (self.keys, self.values):
            for old in [item for item in spans if item[: len(path)] == path]:
                del spans[old]
        self.keys[path], self.values[path] = key, value


class _Indexer:
    """Walks a tree once; ``array_counts`` counts the items of ``[[arrays]]`` seen so far."""

    def __init__(self, file: str, text: str) -> None:
        self.index = SpanIndex(file)
        self.lines = text.encode("utf-8").split(b"\n")
        self.array_counts: dict[KeyPath, int] = {}
        self.closed: set[KeyPath] = set()
        self.pairs: set[KeyPath] = set()
        self.characters: dict[int, list[int] | None] = {}

    def locate(self, first: Node, last: Node | None = None) -> Span:
        """Span from the start of ``first`` to the end of ``last``; byte to character columns."""
        start, end = first.start_point, (last or first).end_point
        return Span(
            self.index.file,
            start.row + 1,
            self._count_characters(start.row, start.column) + 1,
            end.row + 1,
            self._count_characters(end.row, end.column) + 1,
        )

    def _count_characters(self, row: int, column: int) -> int:
        line = self.lines[row] if row < len(self.lines) else b""
        column = min(column, len(line))
        if row not in self.characters:  # once per line: a line may hold everything
            starts = ((byte & 0xC0) != 0x80 for byte in line)
            self.characters[row] = None if line.isascii() else list(accumulate(starts, initial=0))
        counts = self.characters[row]
        return column if counts is None else counts[column]

    def walk_document(self, root: Node) -> None:
        for node in root.children:
            if node.type == "pair":
                self.walk_pair((), node)
            elif node.type in ("table", "table_array_element"):
                self.walk_table(node)
        self.collect_errors(root)

    def walk_table(self, node: Node) -> None:
        """Index ``[a.b]`` or ``[[a.b]]`` and the pairs below it."""
        key = next((child for child in node.children if child.type in _KEY_TYPES), None)
        if key is None:
            return
        parts = list(_split_key(key))
        path: KeyPath = ()
        for name, part in parts[:-1]:
            path = self.enter((*path, name))
            self.index.keys.setdefault(path, self.locate(part))
        brackets = [child for child in node.children if child.type in ("]", "]]")]
        header = self.locate(node, brackets[0] if brackets else key)
        name, part = parts[-1]
        path = (*path, name)
        key_span = self.locate(part)
        if path in self.pairs or (node.type == "table_array_element" and path in self.closed):
            first = self.index.keys.get(path, key_span)
            self.index.duplicates.append(Duplicate(path, first, header))
        elif node.type == "table_array_element":
            self.index.keys.setdefault(path, key_span)
            self.index.values.setdefault(path, header)
            count = self.array_counts.get(path, 0)
            self.array_counts[path] = count + 1
            path = (*path, count)
            self.index.keys[path] = self.index.values[path] = header
            self.index.headers |= {path, path[:-1]}
        else:
            if path in self.closed:
                first = self.index.values[path]
                self.index.duplicates.append(Duplicate(path, first, header))
            self.closed.add(path)
            path = self.enter(path)
            self.index.keys[path] = key_span
            self.index.values.setdefault(path, header)
            self.index.headers.add(path)
        for child in node.children:
            if child.type == "pair":
                self.walk_pair(path, child)

    def enter(self, path: KeyPath) -> KeyPath:
        """Below an array of tables, a header means the array's latest item."""
        count = self.array_counts.get(path)
        return path if count is None else (*path, count - 1)

    def walk_pair(self, base: KeyPath, node: Node) -> None:
        """Index ``a.b = value``."""
        key = next((child for child in node.children if child.type in _KEY_TYPES), None)
        if key is None:
            return
        others = _KEY_TYPES | {"ERROR", "comment"}
        values = [child for child in node.named_children if child.type not in others]
        path = base
        parts = list(_split_key(key))
        for name, part in parts[:-1]:
            path = (*path, name)
            self.pairs.add(path)
            self.index.keys.setdefault(path, self.locate(part))
        name, part = parts[-1]
        path = (*path, name)
        self.pairs.add(path)
        span = self.locate(part)
        if path in self.closed or path in self.array_counts:
            first = self.index.values.get(path, span)
            self.index.duplicates.append(Duplicate(path, first, span))
        elif path in self.index.values:
            self.index.duplicates.append(Duplicate(path, self.index.keys[path], span))
        else:
            self.index.keys[path] = span
        self.index.values.setdefault(path, self.locate(values[0]) if values else span)
        if values:
            self.walk_value(path, values[0])

    def walk_value(self, path: KeyPath, node: Node) -> None:
        if node.type == "inline_table":
            for child in node.named_children:
                if child.type == "pair":
                    self.walk_pair(path, child)
        elif node.type == "array":
            items = (c for c in node.named_children if c.type not in ("comment", "ERROR"))
            for number, child in enumerate(items):
                item = (*path, number)
                self.index.keys[item] = self.index.values[item] = self.locate(child)
                self.walk_value(item, child)

    def collect_errors(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            if node.is_error or node.is_missing:
                self.index.errors.append(self.locate(node))
            elif node.has_error:
                stack.extend(node.children)
        self.index.errors.sort(key=lambda span: (span.line, span.column))


def _split_key(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the parts of a key; a dotted key nests to the left, so its parts go on a stack."""
    parts: list[Node] = []
    while node.type == "dotted_key":
        inner = [child for child in node.named_children if child.type in _KEY_TYPES]
        parts.append(inner[-1])
        node = inner[0]
    parts.append(node)
    for part in reversed(parts):
        text = (part.text or b"").decode("utf-8", errors="replace")
        yield (_unquote(text) if part.type == "quoted_key" else text), part


def _unquote(text: str) -> str:
    """Value of a quoted key; tomli knows the escapes."""
    try:
        value = tomli.loads(f"key = {text}")["key"]
    except (tomli.TOMLDecodeError, RecursionError):
        return text
    return value if isinstance(value, str) else text


def index_spans(file: str, text: str) -> SpanIndex:
    import tree_sitter_toml
    from tree_sitter import Language, Parser

    indexer = _Indexer(file, text)
    tree = Parser(Language(tree_sitter_toml.language())).parse(text.encode("utf-8"))
    indexer.walk_document(tree.root_node)
    return indexer.index


_DUPLICATE_MESSAGES = ("Cannot overwrite", "Cannot declare", "Duplicate inline", "Cannot mutate")

_UNIT = r"(?:[kKMGT]i?B|B|[kMG]?Hz|[num]?s|m?W)"
_SLIPS = (
    (
        re.compile(rf"=\s*(?P<value>[0-9][0-9_.]*\s*{_UNIT}\b(?:/s)?)"),
        "a quantity is text and needs quotes",
    ),
    (re.compile(r"=\s*(?P<value>[0-9]+,[0-9]+)\s*$"), "numbers have a decimal point"),
    (re.compile(r"=\s*(?P<value>[A-Za-z][\w./+-]*)\s*(?:#.*)?$"), "text needs quotes"),
)
"""Values that people write, and their faults."""


def explain_syntax_error(name: str, text: str, error: tomli.TOMLDecodeError) -> list[Diagnostic]:
    if str(error).startswith(_DUPLICATE_MESSAGES):
        duplicates = [
            Diagnostic(
                code="P011",
                message=f"`{format_path(item.path)}` is defined twice",
                help="remove or rename one of them",
                span=item.second,
                notes=(f"{item.first}: first defined here",),
                path=format_path(item.path),
            )
            for item in index_spans(name, text).duplicates
        ]
        if duplicates:
            return duplicates
    message, help_text, span = _describe(name, text, error)
    return [Diagnostic(code="P010", message=message, help=help_text, span=span)]


def _describe(name: str, text: str, error: tomli.TOMLDecodeError) -> tuple[str, str | None, Span]:
    lines = text.split("\n")
    number = min(max(error.lineno, 1), len(lines))
    line = lines[number - 1].rstrip("\r")
    column = min(max(error.colno, 1), len(line) + 1)
    if not line and number > 1 and number == len(lines):  # the end of the document
        number -= 1
        line = lines[number - 1].rstrip("\r")
        column = len(line) + 1
    span = Span(name, number, column, number, column + 1)

    for pattern, message in _SLIPS:
        slip = pattern.search(line)
        if slip is not None and slip.end() + 1 >= column:
            place = Span(name, number, slip.start("value") + 1, number, slip.end("value") + 1)
            return message, f"write {_correct(slip['value'])}", place
    for start, message, help_text in _EXPLANATIONS:
        if error.msg.startswith(start):
            opened = None
            if start.startswith("Unclosed"):
                opened = find_unclosed(text[: min(error.pos, len(text))])
            return message, help_text, span if opened is None else locate(name, text, opened)
    return error.msg[:1].lower() + error.msg[1:], None, span


def _correct(value: str) -> str:
    """The likely meaning of a value without quotes, or of a number with a comma."""
    if value.lower() in ("true", "false"):
        return value.lower()
    if re.fullmatch(r"[0-9]+,[0-9]+", value):
        return value.replace(",", ".")
    return f'"{value}"'


def locate(name: str, text: str, offset: int) -> Span:
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return Span(name, line, column, line, column + 1)


_CLOSE = 'add the closing quote, or use """ for multi-line strings'
_QUOTES = "keys with characters other than A-Z a-z 0-9 _ - need quotes"
_EXPLANATIONS = (
    ("Expected '='", "expected `=` after the key", "write `key = value`"),
    ("Expected ']", "the header has no closing bracket", "write `[table]` or `[[array]]`"),
    ("Invalid statement", "expected a key or a [table] header", _QUOTES),
    ("Invalid initial character for a key part", "expected a key", _QUOTES),
    (
        "Expected newline or end of document",
        "expected the end of the line after the value",
        "one `key = value` per line",
    ),
    ("Invalid value", "expected a value after `=`", "text needs quotes"),
    ("Unterminated string", "unterminated string", _CLOSE),
    ("Unclosed array", "the array has no closing bracket", "add a `]`"),
    ("Unclosed inline table", "the inline table has no closing brace", "add a `}`"),
    ("Unescaped '\\'", "an unknown escape in a text", "write `\\\\` for a backslash, or ' quotes"),
    ("Illegal character '\\n'", "unterminated string", _CLOSE),
    ("Illegal character", "a control character is not allowed here", None),
)
"""Beginning of tomli's message, our message, help."""
