"""A document's file: its bytes, its text, its values, and the findings that keep it from them.

What only a faulty file needs is imported there: `pi2 validate` is to be quick where all is well."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import tomli

from pi2.diagnostics import Diagnostic, Severity, Span, UserError
from pi2.plan.toml.text import KeyPath, name_path

if TYPE_CHECKING:
    from pi2.plan.toml.spans import SpanIndex

Kind = Literal["plan", "device", "model", "family"]
KINDS: tuple[Kind, ...] = ("plan", "device", "model", "family")

MAX_BYTES = 1 << 20
"""Largest file that is read: documents are written by people."""
MAX_DEPTH = 24
"""Deepest nesting of tables and arrays; documents need six."""

MANY_BRACKETS = 300
"""Texts with fewer cannot be nested so deeply that a parser fails."""
MAX_SHOWN = 100
"""Findings per file that are reported one by one."""

CANNOT_READ = frozenset({"P001", "P002", "P003"})
"""Codes that mean that there was nothing to judge: exit code 2 rather than 1."""

_BOM = b"\xef\xbb\xbf"
_TOML_1_1_HINTS = re.compile(r",\s*\}|\\[ex]|\d\d:\d\d(?![\d:])|\{[^}]*\n")


class Places(Protocol):
    def has(self, path: KeyPath) -> bool: ...

    def has_header(self, path: KeyPath) -> bool:
        """Whether the table begins with a [header] or [[header]]."""
        ...

    def find_key(self, path: KeyPath) -> Span:
        """Span of the key at ``path``, or of its nearest ancestor."""
        ...

    def find_value(self, path: KeyPath) -> Span:
        """Span of the value at ``path``, or of its nearest ancestor."""
        ...

    def find_table(self, path: KeyPath) -> Span:
        """Span of the header of the table at ``path``, else of its key, or of an ancestor."""
        ...


@dataclass(frozen=True)
class SourceFile:
    """A TOML file that was read."""

    path: Path
    name: str
    """The path as the user knows it."""
    text: str
    values: dict[str, Any]
    replaced: Mapping[KeyPath, tuple[Span, Span]] = field(default_factory=dict)
    """Places of keys and their values from elsewhere, such as ``--set``."""
    aliases: Mapping[KeyPath, KeyPath] = field(default_factory=dict)
    """Keys that the text calls by another name, and that name."""

    @cached_property
    def spans(self) -> Places:
        """Places of keys and their values; parsed when first asked for."""
        return self.index()

    def index(self) -> SpanIndex:
        from pi2.plan.toml.spans import index_spans

        index = index_spans(self.name, self.text)
        for new, old in self.aliases.items():
            index.alias(new, old)
        for path, (key, value) in self.replaced.items():
            index.replace(path, key, value)
        return index

    def report(
        self,
        code: str,
        path: KeyPath,
        message: str,
        help: str | None = None,
        *,
        severity: Severity = "error",
        span: Span | None = None,
    ) -> Diagnostic:
        """A finding about the value at ``path``, or about what stands at ``span``."""
        return Diagnostic(
            code=code,
            severity=severity,
            message=message,
            help=help,
            span=span or self.spans.find_value(path),
            path=name_path(path),
        )


def detect_kind(name: str) -> Kind | None:
    """Kind of document by the file name's suffix."""
    for kind in KINDS:
        if name.endswith(f".{kind}.toml"):
            return kind
    return None


def display_path(path: Path) -> str:
    """The path relative to the working directory if it is below it, else unchanged."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return str(path)
    return str(path) if relative.startswith("..") else relative


def read_source(path: Path, name: str) -> SourceFile | list[Diagnostic]:
    """Read and parse the file at ``path``; the list says why it cannot be."""
    text = read_text(path, name)
    return [text] if isinstance(text, Diagnostic) else parse_source(path, name, text)


def read_text(path: Path, name: str) -> str | Diagnostic:
    """The text of the file at ``path``, or why there is none."""
    data = _read_bytes(path, name)
    return data if isinstance(data, Diagnostic) else _decode(data, name)


def parse_source(path: Path, name: str, text: str) -> SourceFile | list[Diagnostic]:
    if not text.strip():
        return [_finding("P008", "the file is empty", name, help="start with `schema_version = 3`")]
    if text.count("[") + text.count("{") > MANY_BRACKETS and _is_too_deep(text):
        return [_nesting_finding(name, text)]  # compiled parsers may run out of stack
    try:
        values = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        from pi2.plan.toml.spans import explain_syntax_error

        found = explain_syntax_error(name, text, error)
        return limit_findings(found, len(found))
    except RecursionError:
        return [_nesting_finding(name, text)]
    except ValueError:  # int() refuses decimal numbers of thousands of digits
        return [_huge_number_finding(name, text)]
    if measure_depth(values) > MAX_DEPTH:
        return [_nesting_finding(name, text)]
    source = SourceFile(path=path, name=name, text=text, values=values)
    if not values:
        return [
            _finding("P008", "the file has no keys", name, help="start with `schema_version = 3`")
        ]
    newer_syntax = _find_toml_1_1(source)
    return source if newer_syntax is None else [newer_syntax]


def _is_too_deep(text: str) -> bool:
    from pi2.plan.toml.spans import find_depth

    return find_depth(text, MAX_DEPTH) is not None


def measure_depth(values: Any) -> int:
    """Levels of tables and arrays, without recursion."""
    depth, level = 0, [values]
    while level:
        depth += 1
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = [item for item in below if isinstance(item, dict | list)]
    return depth


def limit_findings(findings: list[Diagnostic], total: int) -> list[Diagnostic]:
    """Keep the first hundred of ``total`` findings, and say how many there are."""
    shown = findings[:MAX_SHOWN]
    if total > len(shown):
        message = f"{total - len(shown)} more findings in this file"
        shown.append(Diagnostic(code="P100", severity="note", message=message, span=shown[-1].span))
    return shown


def _finding(
    code: str, message: str, name: str, *, help: str | None = None, span: Span | None = None
) -> Diagnostic:
    place = span or Span.of_file(name)
    return Diagnostic(code=code, message=message, help=help, span=place)


def _nesting_finding(name: str, text: str) -> Diagnostic:
    from pi2.plan.toml.spans import find_depth, locate

    offset = find_depth(text, MAX_DEPTH)
    return _finding(
        "P012",
        f"tables and arrays are nested more than {MAX_DEPTH} levels deep",
        name,
        help="plans need six levels",
        span=None if offset is None else locate(name, text, offset),
    )


def _huge_number_finding(name: str, text: str) -> Diagnostic:
    match = re.search(r"[0-9_]{4000,}", text)
    span = None
    if match is not None:
        from pi2.plan.toml.spans import locate

        span = locate(name, text, match.start())
    return _finding("P108", "a number has thousands of digits", name, span=span)


def _read_bytes(path: Path, name: str) -> bytes | Diagnostic:
    """All bytes of a regular file of bearable size."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return _finding("P002", "is a folder, expected a file", name)
        if not stat.S_ISREG(status.st_mode):
            return _finding("P002", "is not a regular file", name)
        if status.st_size > MAX_BYTES:
            return _finding(
                "P004",
                f"the file has {status.st_size:,} bytes, at most {MAX_BYTES:,} are read",
                name,
                help="documents are small texts; is this one of the model's files?",
            )
        return path.read_bytes()
    except FileNotFoundError:
        return _finding("P001", "no such file", name, help=_suggest_neighbour(path))
    except NotADirectoryError:
        return _finding("P001", "no such file: a part of the path is not a folder", name)
    except PermissionError:
        return _finding("P003", "permission denied", name, help="check the file's mode and owner")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the name has a NUL byte"
        return _finding("P003", f"cannot be read: {reason}", name)


def _suggest_neighbour(path: Path) -> str | None:
    import difflib

    try:
        names = [entry for entry in os.listdir(path.parent) if entry.endswith(".toml")]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"did you mean {display_path(path.parent / near[0])}?" if near else None


def _decode(data: bytes, name: str) -> str | Diagnostic:
    """UTF-8 text without a byte-order mark and without NUL."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _finding("P006", "the file is UTF-16", name, help="save it as UTF-8")
    if data.startswith(_BOM):
        return _finding(
            "P007",
            "the file begins with a byte-order mark",
            name,
            help='save it as "UTF-8" rather than "UTF-8 with BOM"',
            span=Span(name, 1, 1, 1, 2),
        )
    nul = data.find(0)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if nul < 0:
            span = _locate_byte(data, error.start, name)
            message = f"byte 0x{data[error.start]:02x} is not UTF-8"
            return _finding("P006", message, name, help="save the file as UTF-8", span=span)
        text = ""
    if nul >= 0:
        span = _locate_byte(data, nul, name)
        return _finding("P005", "the file is binary: it has a NUL byte", name, span=span)
    return text


def _locate_byte(data: bytes, offset: int, name: str) -> Span:
    line = data.count(b"\n", 0, offset) + 1
    start = data.rfind(b"\n", 0, offset) + 1
    column = len(data[start:offset].decode("utf-8", errors="replace")) + 1
    return Span(name, line, column, line, column + 1)


def _find_toml_1_1(source: SourceFile) -> Diagnostic | None:
    """Syntax that tomli takes and TOML 1.0 has not: readers of other languages would fail.

    The pattern is a cheap hint; the verdict is tree-sitter's, whose grammar is TOML 1.0."""
    if _TOML_1_1_HINTS.search(source.text) is None:
        return None
    errors = source.index().errors
    if not errors:
        return None
    return Diagnostic(
        code="P013",
        message="this is TOML 1.1, plans are TOML 1.0",
        help="write inline tables on one line without a final comma; no \\e and \\x escapes; "
        "times with seconds",
        span=errors[0],
    )


SET = "--set"
"""Name of the source that overridden values come from."""


def parse_assignments(texts: tuple[str, ...]) -> dict[str, object]:
    """Parse ``KEY=VALUE`` texts; a value that is no TOML value is text."""
    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError.of(
                "P016",
                f"`{SET} {text}`: expected KEY=VALUE",
                help="for example `--set decode.predictor=gate`",
            )
        values[key.strip()] = _parse_value(text, value.strip())
    return values


def _parse_value(text: str, value: str) -> object:
    try:
        parsed = tomli.loads(f"value = {value}")
    except (tomli.TOMLDecodeError, RecursionError, ValueError):
        if value and value[0] not in "\"'[{" and "\n" not in value:
            return value
        raise UserError.of(
            "P016",
            f"`{SET} {text}`: the value is not TOML",
            help="for example `--set memory.budget='\"64 MiB\"'` or `--set io.threads=2`",
        ) from None
    if set(parsed) != {"value"}:
        raise UserError.of("P016", f"`{SET} {text}`: expected one value")
    result: object = parsed["value"]
    return result
