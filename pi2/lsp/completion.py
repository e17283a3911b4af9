"""What may be written at a place: keys, tables, values, and names of documents."""

import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pi2.authoring.explanation import describe_field
from pi2.lsp.checked import Checked
from pi2.plan.documents.common import find_type, list_known_keys
from pi2.plan.reading.references import WRITTEN, list_shipped
from pi2.plan.toml.source import Kind, detect_kind
from pi2.plan.toml.text import KeyPath, write_text

Role = Literal["key", "header", "value", "none"]

_TOKEN = re.compile(
    r"(?P<newline>\n)"
    r"|(?P<blank>[ \t\r]+)"
    r"|(?P<comment>#[^\n]*)"
    r'|(?P<text>"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'.*?(?:\'\'\'|\Z)'
    r'|"(?:\\.|[^"\\\n])*(?:"|(?=\n)|\Z)|\'[^\'\n]*(?:\'|(?=\n)|\Z))'
    r"|(?P<word>[A-Za-z0-9_+-]+)"
    r"|(?P<mark>.)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The text that is being written at a place."""

    role: Role
    path: KeyPath
    """The table around a key or header with the parts before it, or a value's own path."""
    prefix: str = ""
    """What of the word stands before the cursor, without its quote."""
    start: int = 0
    """Offset of the word, behind its quote."""
    is_quoted: bool = False


@dataclass
class _Frame:
    mark: str
    """Closing bracket, or nothing for the document."""
    path: KeyPath
    parts: list[str] = field(default_factory=list)
    """Parts of the key so far."""
    in_value: bool = False
    is_done: bool = False
    """Whether the value is complete."""
    count: int = 0
    """Items of an array so far."""

    def start_pair(self) -> None:
        self.parts, self.in_value, self.is_done = [], False, False

    @property
    def value_path(self) -> KeyPath:
        return (*self.path, self.count) if self.mark == "]" else (*self.path, *self.parts)


class _Reader:
    def __init__(self) -> None:
        self.root = _Frame("", ())
        self.frames = [self.root]
        self.counts: dict[KeyPath, int] = {}
        self.header: list[str] | None = None
        self.brackets = 0

    def take(self, kind: str, text: str) -> None:
        if kind in ("blank", "comment"):
            return
        if self.header is not None:
            self.take_header(kind, text)
            return
        frame = self.frames[-1]
        if kind == "newline":
            if frame.mark == "":
                frame.start_pair()
        elif kind in ("word", "text"):
            self.take_word(frame, kind, text)
        elif text in "[{":
            self.open(frame, text)
        elif text in "]}":
            self.close(text)
        elif text == "=" and frame.mark != "]":
            frame.in_value = True
        elif text == ",":
            if frame.mark == "]":
                frame.count += 1
            elif frame.mark == "}":
                frame.start_pair()
            frame.is_done = False

    def take_word(self, frame: _Frame, kind: str, text: str) -> None:
        if frame.in_value or frame.mark == "]":
            frame.is_done = True
        else:
            frame.parts.append(unquote(text) if kind == "text" else text)

    def open(self, frame: _Frame, mark: str) -> None:
        if frame.mark == "" and not frame.in_value and not frame.parts and mark == "[":
            self.header, self.brackets = [], 1
            return
        closing = "]" if mark == "[" else "}"
        if frame.in_value or frame.mark == "]":
            self.frames.append(_Frame(closing, frame.value_path))

    def close(self, mark: str) -> None:
        if len(self.frames) > 1 and self.frames[-1].mark == mark:
            self.frames.pop()
            self.frames[-1].is_done = True

    def take_header(self, kind: str, text: str) -> None:
        assert self.header is not None
        if kind == "newline":
            self.header = None
        elif kind in ("word", "text"):
            self.header.append(unquote(text) if kind == "text" else text)
        elif text == "[" and not self.header:
            self.brackets = 2
        elif text == "]":
            self.enter(self.header)
            self.header = None
            self.root.is_done = True  # the second bracket, and what follows on the line

    def enter(self, parts: list[str]) -> None:
        path: KeyPath = ()
        for number, part in enumerate(parts):
            path = (*path, part)
            if number == len(parts) - 1 and self.brackets == 2:
                self.counts[path] = self.counts.get(path, -1) + 1
            if path in self.counts:
                path = (*path, self.counts[path])
        self.root.path = path
        self.root.start_pair()
        del self.frames[1:]


def unquote(text: str) -> str:
    """A text without its quotes; escapes stay as they are."""
    for quote in ('"""', "'''", '"', "'"):
        if text.startswith(quote):
            inner = text[len(quote) :]
            return inner.removesuffix(quote)
    return text


def find_cursor(text: str, offset: int) -> Cursor:
    """Find the text that is being written at ``offset``."""
    reader = _Reader()
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "mark"
        is_open = kind in ("word", "text", "comment") and match.start() < offset <= match.end()
        if is_open and kind == "text" and offset == match.end() and _is_closed(match[0]):
            is_open = False
        if match.start() >= offset or is_open:
            if not is_open:
                return _describe(reader, "", offset, quoted=False)
            if kind == "comment":
                return Cursor(role="none", path=())
            quote = len(match[0]) - len(match[0].lstrip("\"'")) if kind == "text" else 0
            quote = min(quote, 3 if match[0][:3] in ('"""', "'''") else 1) if quote else 0
            start = min(match.start() + quote, offset)
            return _describe(reader, text[start:offset], start, quoted=quote > 0)
        reader.take(kind, match[0])
    return _describe(reader, "", offset, quoted=False)


def _is_closed(token: str) -> bool:
    return len(token) > 1 and token[-1] == token[0]


def _describe(reader: _Reader, prefix: str, start: int, *, quoted: bool) -> Cursor:
    frame = reader.frames[-1]
    if reader.header is not None:
        return Cursor(
            role="header", path=tuple(reader.header), prefix=prefix, start=start, is_quoted=quoted
        )
    if frame.is_done:
        return Cursor(role="none", path=frame.value_path)
    is_value = frame.in_value or frame.mark == "]"
    return Cursor(
        role="value" if is_value else "key",
        path=frame.value_path,
        prefix=prefix,
        start=start,
        is_quoted=quoted,
    )


_TABLES_OF_UNITS: tuple[KeyPath, ...] = (
    ("units",),
    ("memory", "units"),
    ("projections", "attention"),
    ("projections", "head"),
)
"""Tables of a plan, other than ``split``, whose keys are units of its device."""

SUGGESTED = Literal["key", "table", "value", "file"]


@dataclass(frozen=True, kw_only=True)
class Item:
    label: str
    insert: str
    """What replaces the word at the cursor."""
    sort: SUGGESTED = "value"
    detail: str = ""
    text: str = ""
    """Explanation of the completion, Markdown."""


def complete(checked: Checked, offset: int) -> tuple[Cursor, list[Item]]:
    """The place at ``offset``, and what may be written there; editors narrow it by the word."""
    if not checked.is_written_by_people:
        return Cursor(role="none", path=(), start=offset), []
    cursor = find_cursor(checked.text, offset)
    kind = checked.kind
    if kind is None or cursor.role == "none":
        return cursor, []
    if cursor.role == "key":
        return cursor, list(_list_keys(checked, kind, cursor))
    if cursor.role == "header":
        return cursor, list(_list_tables(checked, kind, cursor))
    quote = "" if cursor.is_quoted else '"'
    items = {item.label: item for item in _list_values(checked, kind, cursor, quote)}
    return cursor, list(items.values())


def _list_keys(checked: Checked, kind: Kind, cursor: Cursor) -> Iterator[Item]:
    present = {path[-1] for path in checked.spans.keys if path[:-1] == cursor.path}
    for name in _list_names(checked, kind, cursor.path):
        if name in present and name != cursor.prefix:
            continue
        yield _describe_key(kind, (*cursor.path, name), name)


def _describe_key(kind: Kind, path: KeyPath, name: str) -> Item:
    doc = describe_field(WRITTEN[kind], path)
    found = find_type(WRITTEN[kind], path)
    is_table = isinstance(found, type) and issubclass(found, BaseModel)
    if doc is None:
        return Item(label=name, insert=name, sort="key")
    detail = doc.values + (" (required)" if doc.is_required else "")
    return Item(
        label=name, insert=name, sort="table" if is_table else "key", detail=detail, text=doc.text
    )


def _list_names(checked: Checked, kind: Kind, path: KeyPath) -> list[str]:
    known = list_known_keys(WRITTEN[kind], path)
    if known:
        return known
    if get_origin(find_type(WRITTEN[kind], path)) is not dict:
        return []
    if kind == "plan" and (path[-1:] == ("split",) or path in _TABLES_OF_UNITS):
        return checked.list_units()
    return ["cpu", "gpu", "npu"] if path in (("units",), ("backends",)) else []


def _list_tables(checked: Checked, kind: Kind, cursor: Cursor) -> Iterator[Item]:
    for name in _list_names(checked, kind, cursor.path):
        found = find_type(WRITTEN[kind], (*cursor.path, name))
        item = get_args(found)[0] if get_origin(found) is tuple else found
        if get_origin(item) is dict or (isinstance(item, type) and issubclass(item, BaseModel)):
            yield _describe_key(kind, (*cursor.path, name), name)


def _list_values(checked: Checked, kind: Kind, cursor: Cursor, quote: str) -> Iterator[Item]:
    path = cursor.path
    if kind == "plan" and path in (("device",), ("model",)):
        wanted: Kind = "device" if path == ("device",) else "model"
        yield from _list_documents(checked, wanted, quote)
        return
    if path[:1] == ("extends",):
        yield from _list_documents(checked, kind, quote)
        return
    if kind == "plan" and path == ("weights",):
        yield from _list_stores(checked, quote)
        return
    if kind == "plan" and path == ("prefill", "unit"):
        for name in checked.list_units():
            yield from _offer(name, quote, "unit of the device")
        return
    found = find_type(WRITTEN[kind], path)
    options = [found]
    if get_origin(found) in (Union, types.UnionType):
        options = list(get_args(found))
    for option in options:
        if get_origin(option) is Literal:
            for value in get_args(option):
                yield from _offer(value, quote, "")
        elif option is bool:
            yield from (Item(label=text, insert=text) for text in ("true", "false") if quote)
    doc = describe_field(WRITTEN[kind], path)
    if doc is not None:
        examples = [item for item in (doc.default, *doc.examples) if item is not None]
        for text in examples:
            if text.startswith('"') or quote:
                shown = text.strip('"')
                detail = "default" if text == doc.default else "example"
                if not shown:
                    continue
                insert = shown if not quote and text.startswith('"') else text
                yield Item(label=shown, insert=insert, detail=detail)


def _offer(value: Any, quote: str, detail: str, sort: SUGGESTED = "value") -> Iterator[Item]:
    if isinstance(value, str):
        insert = write_text(value) if quote else value
        yield Item(label=value, insert=insert, sort=sort, detail=detail)
    elif quote:
        yield Item(label=str(value), insert=str(value), detail=detail)


def _list_documents(checked: Checked, kind: Kind, quote: str) -> Iterator[Item]:
    for reference in _list_locked(checked, kind):
        yield from _offer(reference, quote, "locked", "file")
    for name in _list_near(checked, kind):
        yield from _offer(name, quote, "file", "file")
    for name in list_shipped(kind):
        yield from _offer(name, quote, f"{kind} that comes with pi2", "file")


def _list_locked(checked: Checked, kind: Kind) -> Iterable[str]:
    from pi2.diagnostics import UserError
    from pi2.sharing.lock import find_lock, read_lock

    found = find_lock(checked.path.parent)
    if found is None:
        return
    try:
        sources = read_lock(found).sources
    except UserError:
        return
    yield from (item.reference for item in sources if detect_kind(item.file_name) == kind)


def _list_near(checked: Checked, kind: Kind) -> Iterator[str]:
    """Files of a kind in the folder, its sister ``devices`` or ``models``, and the one above."""
    own = checked.path.parent
    for relative in ("", f"{kind}s/", "../", f"../{kind}s/"):
        folder = own / relative
        try:
            names = sorted(path.name for path in folder.glob(f"*.{kind}.toml"))
        except OSError:
            continue
        for name in names[:100]:
            if (folder / name).resolve() != checked.path.resolve():
                yield f"{relative}{name}"


def _list_stores(checked: Checked, quote: str) -> Iterator[Item]:
    own = checked.path.parent
    for pattern in ("*/manifest.json", "stores/*/manifest.json", "../stores/*/manifest.json"):
        for path in sorted(own.glob(pattern))[:100]:
            relative = path.parent.as_posix().removeprefix(f"{own.as_posix()}/")
            yield from _offer(relative, quote, "neuron store", "file")
