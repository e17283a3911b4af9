"""References to documents elsewhere: form and meaning.

::

    gh:owner/repo//devices/acme-12.device.toml@v1         a file of a GitHub repository
    git+https://host/repo.git//devices/x.device.toml@v1   a file of any repository
    git+file:///srv/profiles//devices/x.device.toml@v1    the same, on this machine
    https://host/x.device.toml                            a file of a web server
    file:../profiles/x.device.toml                        a file of this machine

A revision is a tag, a branch or a whole commit.  Every fault is reported at the character where it
stands."""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import unquote, urlsplit

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.reading.references import LOCK, Located, has_scheme
from pi2.plan.toml.source import KINDS, Kind, detect_kind, display_path

if TYPE_CHECKING:
    from pi2.sharing.fetching import Settings
    from pi2.sharing.lock import Lock


Scheme = Literal["gh", "git+https", "git+http", "git+file", "https", "http", "file"]

MAX_LENGTH = 500

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_IN_REPOSITORY = re.compile(
    r"(?P<scheme>gh|git\+https?|git\+file):(?P<repository>(?://)*(?:(?!//).)*)"
    r"//(?P<path>.*)@(?P<revision>[^@]*)",
    re.DOTALL,
)
_OF_WEB = re.compile(r"(?P<scheme>https?)://[^/]*/?(?P<path>.*)", re.DOTALL)
_OF_MACHINE = re.compile(r"(?P<scheme>file):(?://(?=/))?(?P<path>.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Reference:
    text: str
    scheme: Scheme
    url: str = ""
    """Repository or file; ``gh:`` owner and name, or the path of a file as written."""
    path: str = ""
    """File inside the repository."""
    revision: str = ""
    """Tag, branch or commit; empty where there is none."""

    @property
    def is_git(self) -> bool:
        return self.scheme in ("gh", "git+https", "git+http", "git+file")

    @property
    def is_local(self) -> bool:
        return self.scheme in ("git+file", "file")

    @property
    def names_commit(self) -> bool:
        """Whether the revision can never mean anything else."""
        return _COMMIT.fullmatch(self.revision) is not None

    def locate(self, github: str, base: Path) -> str:
        """The address of the repository or file: ``gh:`` stands for ``github``, and paths are
        relative to ``base``."""
        match self.scheme:
            case "gh":
                return f"{github}/{self.url}"
            case "git+file":
                place = base / self.url
                # People write blanks as addresses have them, too.
                decoded = base / unquote(self.url)
                return (place if place.exists() else decoded).resolve().as_uri()
            case "file":
                return (base / self.url).absolute().as_uri()
        return self.url


@cache
def read_table() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def parse_reference(text: str) -> Reference:
    """Take ``text`` apart; `UserError` P701 to P706 points at its fault."""
    for number, char in enumerate(text[:MAX_LENGTH]):
        if not char.isprintable() or char in '\\"<>`^{|}':
            raise _refuse(text, "P701", f"{char!r} in a reference", number, number + 1)
    _check(text, "text", text, 0)
    try:
        if urlsplit(text.removeprefix("git+")).port == 0:
            raise ValueError("port 0")
    except ValueError as error:
        raise _refuse(text, "P701", f"no URL: {error}", 0, len(text)) from None
    forms = (form.fullmatch(text) for form in (_IN_REPOSITORY, _OF_WEB, _OF_MACHINE))
    parts = next(found for found in forms if found is not None)
    scheme, path = cast(Scheme, parts["scheme"]), parts["path"]
    if scheme != "file":
        _check(text, "path", path, parts.start("path"))
    if detect_kind(path) is None:
        name, end = path.rpartition("/")[2], parts.end("path")
        message = f"`{name}` is no document" if name else "the file's name is missing"
        help_text = f"names of documents end in {', '.join(f'.{kind}.toml' for kind in KINDS)}"
        raise _refuse(text, "P706", message, end - len(name), end, help_text)
    if parts.re is not _IN_REPOSITORY:
        return Reference(text=text, scheme=scheme, url=path if scheme == "file" else text)
    revision, url = parts["revision"], parts["repository"]
    _check(text, "revision", revision, parts.start("revision"))
    if scheme != "gh":
        own = scheme.removeprefix("git+")
        url = url.removeprefix("//") if own == "file" else f"{own}:{url}"
    return Reference(text=text, scheme=scheme, url=url, path=path, revision=revision)


def _check(text: str, part: str, value: str, start: int) -> None:
    """Raise the first fault of a ``part`` that is ``value`` and stands at ``start``."""
    for fault in read_table()["faults"]:
        found = fault["in"] == part and re.search(f"(?s){fault['pattern']}", value)
        if not found:
            continue
        message, help_text = fault["says"].format(at=found["at"]), fault.get("help")
        if fault["code"] == "P702":
            help_text = read_table()["elsewhere"].get(found["at"].lower(), help_text)
        place, end = found.span("at")
        raise _refuse(text, fault["code"], message, start + place, start + end, help_text)


NAME = "reference"
"""Name of the source that diagnostics about references point into."""


def _refuse(
    text: str, code: str, message: str, start: int, end: int, help: str | None = None
) -> UserError:
    span = Span(NAME, 1, start + 1, 1, max(end, start + 1) + 1)
    found = Diagnostic(code=code, message=message, help=help, span=span)
    return UserError([found], exit_code=2, sources={NAME: text})


class LockedReferences:
    """The `Resolver` of documents in a folder; ``locked`` also refuses changed local sources."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Settings | None = None,
        locked: bool = False,
        lock: Lock | None = None,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._locked = locked
        self._lock = lock

    def find(self, reference: str, kind: Kind) -> Located | None:
        """The locked file of ``reference``, None for a plain name; UserError P701-P715."""
        if not has_scheme(reference):
            return None
        from pi2.sharing.lock import find_lock, read_lock

        if self._lock is None:
            found = find_lock(self._folder)
            self._lock = None if found is None else read_lock(found)
        if self._lock is None:
            raise UserError.of(
                "P710",
                f"`{reference}` is not locked: there is no {LOCK}",
                help=f"`pi2 profile add {reference}` makes one; commit it",
            )
        return self._locate(reference, kind)

    def _locate(self, reference: str, kind: Kind) -> Located:
        from pi2.sharing.fetching import Cache, read_settings
        from pi2.sharing.lock import check_agreement, check_drift, require_copy

        settings = self._settings or read_settings()
        parsed = parse_reference(reference)
        lock = self._lock
        assert lock is not None
        source = lock.find(reference)
        if source is None:
            raise UserError.of(
                "P710",
                f"`{reference}` is not in {display_path(lock.path)}",
                help=f"`pi2 profile add {reference}` locks it",
            )
        if detect_kind(source.file_name) != kind:
            message = f"`{reference}` is a {detect_kind(source.file_name)}, expected a {kind}"
            raise UserError.of("P014", message)
        check_agreement(parsed, source, lock)
        if self._locked:
            check_drift(parsed, source, lock, settings)
        path = require_copy(source, Cache(settings.cache))
        return Located(path=path, file_name=source.file_name, name=reference, reference=reference)

    def join(self, reference: str, relative: str) -> str:
        """The reference of ``relative`` seen from ``reference``; UserError P705 outside."""
        return join_reference(reference, relative)


def join_reference(reference: str, relative: str) -> str:
    """The reference of the file at ``relative``, seen from the file of ``reference``."""
    parsed = parse_reference(reference)
    if parsed.is_git:
        path = _join_path(parsed.path, relative, reference)
        begin = reference.rindex(f"//{parsed.path}@") + 2
        return f"{reference[:begin]}{path}{reference[begin + len(parsed.path) :]}"
    if parsed.scheme == "file":
        folder = posixpath.dirname(parsed.url)
        return f"file:{posixpath.normpath(posixpath.join(folder, relative))}"
    host, slash, path = reference.partition("://")[2].partition("/")
    return f"{parsed.scheme}://{host}{slash}{_join_path(path, relative, reference)}"


def _join_path(path: str, relative: str, reference: str) -> str:
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(path), relative))
    if relative.startswith("/") or joined.startswith(("../", "/")) or joined in (".", ".."):
        raise UserError.of(
            "P705",
            f"`{relative}` leads out of the place of `{reference}`",
            help="its author can name it by a whole reference",
        )
    return joined
