"""What may be written at a place: keys, tables, values, and names of documents."""

import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any, Literal, Union, get_args, get_origin

import tomli

from pi2.authoring.explanation import describe_field
from pi2.lsp.checked import Checked
from pi2.plan.documents.common import find_type, is_table, list_known_keys
from pi2.plan.reading.references import WRITTEN, list_shipped
from pi2.plan.toml.source import Kind, detect_kind
from pi2.plan.toml.text import KeyPath, write_text

Role = Literal["key", "header", "value", "none"]

_TOKEN = re.compile(
    r"(?P<comment>#[^\n]*)"
    r'|(?P<text>"""(?:\\.|[^\\])*?(?:"""|\Z)|\'\'\'.*?(?:\'\'\'|\Z)'
    r'|"(?:\\.|[^"\\\n])*(?:"|(?=\n)|\Z)|\'[^\'\n]*(?:\'|(?=\n)|\Z))'
    r"|(?P<mark>[\[\]{}\n])",
    re.DOTALL,
)
_HEADER = re.compile(r"[ \t]*\[")
_WORD = f"{ascii_letters}{digits}_+-"
_CLOSING = {"[": "]", "{": "}"}
_HERE = "the-cursor-is-here"
"""Stands for the word at the cursor."""


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


def find_cursor(text: str, offset: int) -> Cursor:
    """Find the text that is being written at ``offset``.  Its statement is completed and read below
    the headers before it: other statements may be wrong."""
    before, headers = text[:offset], list[str]()
    begin, closing, quotes = 0, "", 0
    start = len(before.rstrip(_WORD))
    for token in _TOKEN.finditer(before):
        mark, is_last = token[0], token.end() == len(before)
        if token["comment"]:
            if is_last:
                return Cursor(role="none", path=())
        elif token["text"]:
            if is_last and (len(mark) == 1 or mark[-1] != mark[0]):
                quotes = 3 if mark[:3] in ('"""', "'''") else 1
                start = token.start() + quotes
        elif mark == "\n":
            is_header = _HEADER.match(before, begin) is not None
            if is_header or not closing:
                headers += [before[begin : token.start()]] if is_header else []
                begin, closing = token.end(), ""
        elif mark in _CLOSING:
            closing = _CLOSING[mark] + closing
        elif mark == closing[:1]:
            closing = closing[1:]
    stem = before[begin : start - quotes]
    documents: dict[Role, str]
    if _HEADER.match(before, begin):
        name = stem.lstrip().removeprefix("[").removeprefix("[")
        documents = {"header": f"{name}{_HERE} = 0"}
    else:
        arrays = [header for header in headers[:-1] if header.lstrip().startswith("[[")]
        above = "\n".join([*arrays, *headers[-1:], stem])
        documents = {"value": f'{above}"{_HERE}"{closing}', "key": f"{above}{_HERE} = 0{closing}"}
    for role, document in documents.items():
        try:
            path = _find_here(tomli.loads(document), ())
        except (ValueError, RecursionError):
            continue
        if path is not None:
            return Cursor(
                role=role,
                path=path if role == "value" else path[:-1],
                prefix=before[start:],
                start=start,
                is_quoted=quotes > 0,
            )
    return Cursor(role="none", path=())


def _find_here(value: Any, path: KeyPath) -> KeyPath | None:
    """The path of the key or value that stands for the cursor's word."""
    if value == _HERE or path[-1:] == (_HERE,):
        return path
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    found = (_find_here(item, (*path, key)) for key, item in items)
    return next((place for place in found if place is not None), None)


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
    if doc is None:
        return Item(label=name, insert=name, sort="key")
    detail = doc.values + (" (required)" if doc.is_required else "")
    sort: SUGGESTED = "table" if is_table(find_type(WRITTEN[kind], path)) else "key"
    return Item(label=name, insert=name, sort=sort, detail=detail, text=doc.text)


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
        if get_origin(item) is dict or is_table(item):
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
