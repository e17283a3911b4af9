"""A project's known findings, which are not reported again: a baseline, comments in documents, and
``[tool.pi2]``.

A comment is about its line; one that has a line of its own, about the next one.  Comments before
the first line of a document are also about findings that have no line."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli

from pi2.diagnostics.diagnostic import Diagnostic, Span, UserError
from pi2.diagnostics.reports import compute_fingerprints

FILE = "pyproject.toml"
UNUSED, WRONG_SETTING = "P029", "P030"
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|(#[^\n]*)', re.DOTALL
)
_MARK = re.compile(r"#\s*pi2:\s*")
_IGNORE = re.compile(r"ignore\s+(P\d{3}(?:\s*,\s*P\d{3})*)\s*(?:\(\s*(\S.*?)\s*\))?\s*")
_CODE = re.compile(r"P\d{3}")
_FORM = "write `# pi2: ignore P403 (reason)`"


@dataclass
class Ignore:
    """A code that is to be left out somewhere."""

    code: str
    span: Span
    lines: range = range(0)
    """Lines of the file ``span`` is in; 0 stands for findings without a line."""
    pattern: str | None = None
    """Files of a project instead, by their path in it."""
    is_used: bool = False

    def covers(self, item: Diagnostic, root: Path | None) -> bool:
        """Whether it is about a finding; ``root`` is the project's folder."""
        if item.code != self.code or item.span is None:
            return False
        if self.pattern is not None:
            return root is not None and matches(item.span.file, self.pattern, root)
        if item.span.file != self.span.file:
            return False
        if item.span.is_whole_file and 0 in self.lines:
            return True
        return any(item.span.line <= line <= item.span.end_line for line in self.lines)


@dataclass(frozen=True)
class ProjectSettings:
    """The table ``[tool.pi2]``; by default nothing."""

    root: Path | None = None
    """Folder of the project."""
    strict: bool = False
    baseline: Path | None = None
    ignores: Sequence[Ignore] = ()


@dataclass(frozen=True)
class Sifted:
    diagnostics: tuple[Diagnostic, ...]
    ignored: int = 0


def read_project(folder: Path) -> ProjectSettings:
    """The settings of the project that ``folder`` is in; UserError P030 if they are wrong."""
    place = Path(os.path.abspath(folder))
    for parent in (place, *place.parents):
        file = parent / FILE
        try:
            text = file.read_text("utf-8")
            table = tomli.loads(text).get("tool", {}).get("pi2") if "tool.pi2" in text else None
        except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError):
            continue  # other programs say so
        if table is not None:
            return _read_table(file, text, table)
    return ProjectSettings()


def _read_table(file: Path, text: str, table: Any) -> ProjectSettings:
    name = os.path.relpath(file)
    wanted: dict[str, type | tuple[type, ...]] = {
        "strict": bool,
        "baseline": str,
        "ignore": (list, dict),
        "per-file-ignores": dict,
    }
    if not isinstance(table, dict):
        raise _report(name, text, "tool.pi2", "[tool.pi2] is a table")
    for key, value in table.items():
        if key not in wanted:
            known = ", ".join(wanted)
            raise _report(name, text, key, f"unknown key `{key}` in [tool.pi2]", f"known: {known}")
        if not isinstance(value, wanted[key]):
            raise _report(name, text, key, f"`{key}` of [tool.pi2] has a wrong type")
    by_pattern = {"**": table.get("ignore", []), **table.get("per-file-ignores", {})}
    found = []
    for pattern, codes in by_pattern.items():
        if not isinstance(codes, list | dict):
            raise _report(name, text, pattern, f"{pattern!r} takes codes, such as ['P403']")
        for code in codes:
            if not isinstance(code, str) or not _CODE.fullmatch(code):
                raise _report(name, text, str(code), f"{code!r} is no code, such as P403")
            found.append(Ignore(code, _find_line(name, text, code), pattern=pattern))
    baseline = file.parent / table["baseline"] if "baseline" in table else None
    return ProjectSettings(file.parent, table.get("strict", False), baseline, found)


def _report(
    name: str, text: str, word: str, message: str, help_text: str | None = None
) -> UserError:
    span = _find_line(name, text, word)
    return UserError([Diagnostic(code=WRONG_SETTING, message=message, help=help_text, span=span)])


def _find_line(name: str, text: str, word: str) -> Span:
    """The first place of a word behind the table's header."""
    start = text.find(word, max(0, text.find("[tool.pi2")))
    if start < 0:
        return Span.of_file(name)
    line = text.count("\n", 0, start) + 1
    column = start - text.rfind("\n", 0, start)
    return Span(name, line, column, line, column + len(word))


def matches(file: str, pattern: str, root: Path) -> bool:
    """Whether a pattern of a project means a file: its path from ``root``, or its name."""
    path = os.path.relpath(os.path.abspath(file), root).replace(os.sep, "/")
    if pattern == "**":
        return True
    return fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern)


def read_comments(file: str, text: str) -> tuple[list[Ignore], list[Diagnostic]]:
    if "pi2:" not in text:
        return [], []
    lines = text.split("\n")
    found: list[Ignore] = []
    wrong: list[Diagnostic] = []
    for token in _TOKEN.finditer(text):
        comment = token[1]
        mark = None if comment is None else _MARK.match(comment)
        if mark is None:
            continue
        number = text.count("\n", 0, token.start(1)) + 1
        column = token.start(1) - text.rfind("\n", 0, token.start(1))
        span = Span(file, number, column, number, column + len(comment))
        match = _IGNORE.fullmatch(comment[mark.end() :])
        if match is None:
            wrong.append(_warn(span, "this comment for pi2 cannot be read", _FORM))
            continue
        if match[2] is None:
            wrong.append(_warn(span, f"why is {match[1]} ignored?", _FORM))
        about = _find_lines(lines, number)
        found += [Ignore(code, span, about) for code in re.split(r"\s*,\s*", match[1])]
    return found, wrong


def _find_lines(lines: Sequence[str], number: int) -> range:
    if not lines[number - 1].lstrip().startswith("#"):
        return range(number, number + 1)
    after = number
    while after < len(lines) and (not lines[after].strip() or lines[after].lstrip()[0] == "#"):
        after += 1
    is_first = all(not line.strip() or line.lstrip()[0] == "#" for line in lines[: number - 1])
    return range(0 if is_first else after + 1, after + 2)


def _warn(span: Span, message: str, help_text: str) -> Diagnostic:
    return Diagnostic(code=UNUSED, severity="warning", message=message, help=help_text, span=span)


def sift(
    diagnostics: Iterable[Diagnostic],
    sources: Mapping[str, str],
    checked: Iterable[str],
    project: ProjectSettings | None = None,
) -> Sifted:
    """Leave out ignored findings; unused or unreadable ignores in ``checked`` are findings."""
    project = project or ProjectSettings()
    ignores: list[Ignore] = []
    left: list[Diagnostic] = []
    odd: list[Diagnostic] = []
    own = set(checked)
    for file, text in sources.items():
        found, wrong = read_comments(file, text)
        ignores += found
        odd += wrong if file in own else []
    ignored = 0
    for item in diagnostics:
        mine = [x for x in (*ignores, *project.ignores) if x.covers(item, project.root)]
        for ignore in mine:
            ignore.is_used = True
        ignored += bool(mine)
        left += [] if mine else [item]
    unused = [item for item in ignores if not item.is_used and item.span.file in own]
    unused += _list_unused(project, own)
    left += odd
    left += [
        _warn(item.span, f"{item.code} is ignored here, but not found", "remove the ignore")
        for item in unused
    ]
    return Sifted(tuple(left), ignored)


def _list_unused(project: ProjectSettings, checked: set[str]) -> Iterator[Ignore]:
    unused = [item for item in project.ignores if not item.is_used]
    if project.root is None or not unused:
        return
    known = {os.path.realpath(file) for file in checked}
    files = [str(file) for file in _list_files(project.root)]
    for item in unused:
        assert item.pattern is not None
        mine = [file for file in files if matches(file, item.pattern, project.root)]
        if all(os.path.realpath(file) in known for file in mine):
            yield item


def _list_files(root: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith((".plan.toml", ".device.toml", ".model.toml")):
                yield Path(parent, name)


VERSION = 1
_KEY = "fingerprint"


def read_baseline(file: Path) -> dict[str, str]:
    """Files by the fingerprints of findings in them; UserError P031 if it cannot be read."""
    try:
        content = json.loads(file.read_text("utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        return {str(item[_KEY]): str(item["file"]) for item in content["findings"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError.of(
            "P031",
            f"cannot read the baseline: {reason}",
            file=str(file),
            help=f"make it with `pi2 validate --write-baseline --baseline {file} FILE...`",
        ) from None


def write_baseline(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """The text of a baseline with these findings, in a stable order."""
    prints = compute_fingerprints(diagnostics, sources)
    rows = [
        {
            "file": "" if item.span is None else item.span.file,
            "code": item.code,
            "message": item.message,
            _KEY: print_,
        }
        for item, print_ in zip(diagnostics, prints, strict=True)
    ]
    rows.sort(key=lambda row: tuple(row.values()))
    return json.dumps({"version": VERSION, "findings": rows}, indent=1) + "\n"


def leave_out_known(
    diagnostics: Sequence[Diagnostic], sources: Mapping[str, str], baseline: Mapping[str, str]
) -> tuple[tuple[Diagnostic, ...], set[str]]:
    prints = compute_fingerprints(diagnostics, sources)
    new = [item for item, own in zip(diagnostics, prints, strict=True) if own not in baseline]
    return tuple(new), set(baseline) - set(prints)
