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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, cast, get_args
from urllib.parse import unquote, urlsplit

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.reading.references import LOCK, Located, has_scheme
from pi2.plan.toml.source import KINDS, Kind, detect_kind, display_path

if TYPE_CHECKING:
    from pi2.sharing.fetching import Settings
    from pi2.sharing.lock import Lock


Scheme = Literal["gh", "git+https", "git+http", "git+file", "https", "http", "file"]

SCHEMES = get_args(Scheme)
KNOWN_ELSEWHERE = {
    "oci": "pi2 reads no OCI registries",
    "hf": "pi2 reads no model hubs",
    "git+ssh": "use git+https, or clone the repository and use git+file",
    "ssh": "use git+https, or clone the repository and use git+file",
    "git": "use git+https",
    "http+git": "use git+https",
    "github": "write gh:owner/repo//path@revision",
    "ftp": "use https",
    "tap": "write the whole reference: gh:owner/repo//devices/NAME.device.toml@revision",
}

MAX_LENGTH = 500

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?=:)")
_OWNER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]{0,199}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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

    @property
    def file_name(self) -> str:
        path = self.path or urlsplit(self.url).path if self.scheme != "file" else self.url
        return path.rpartition("/")[2]


def parse_reference(text: str) -> Reference:
    """Take ``text`` apart; `UserError` P701 to P706 points at its fault."""
    if len(text) > MAX_LENGTH:
        _refuse(text, "P701", f"a reference has at most {MAX_LENGTH} characters", MAX_LENGTH)
    found = _SCHEME.match(text)
    blanks_from = _find_paths(text, "" if found is None else found[0])
    for number, char in enumerate(text):
        is_inner = (
            text[number + 1 : number + 2] not in ("", "@", "/") and text[number - 1] not in "/:"
        )
        if char == " " and not (is_inner and number >= blanks_from):
            hint = "write %20 in addresses; names of files and folders may have blanks in them"
            _refuse(text, "P701", "a blank in a reference", number, number + 1, help=hint)
        if not char.isprintable() or char in '\\"<>`^{|}':
            _refuse(text, "P701", f"{char!r} in a reference", number, number + 1)
    if found is None:
        schemes = ", ".join(f"{item}:" for item in SCHEMES if "http:" not in f"{item}:")
        _refuse(text, "P701", "a reference begins with its scheme", 0, help=f"one of {schemes}")
    scheme = found[0]
    if scheme not in SCHEMES:
        _refuse_scheme(text, scheme)
    start = len(scheme) + 1
    if scheme in ("https", "http"):
        _check_url(text, scheme, 0, len(text))
        reference = Reference(text=text, scheme=cast(Scheme, scheme), url=text)
        _check_path(text, urlsplit(text).path.lstrip("/"), text.find("/", start + 2) + 1)
        return reference
    if scheme == "file":
        return _parse_file(text, start)
    return _parse_git(text, scheme, start)


def _find_paths(text: str, scheme: str) -> int:
    """Offset from which blanks are allowed: paths of this machine, and paths in a repository."""
    if scheme in ("file", "git+file"):
        return len(scheme) + 1
    if scheme in ("gh", "git+https", "git+http"):
        at = text.find("//", text.find("//") + 2 if scheme != "gh" else 0)
        return len(text) if at < 0 else at
    return len(text)


def _refuse_scheme(text: str, scheme: str) -> NoReturn:
    lower = scheme.lower()
    if lower in SCHEMES:
        hint = f"write {lower}: in small letters"
        _refuse(text, "P701", "schemes are lower case", 0, len(scheme), help=hint)
    help_text = KNOWN_ELSEWHERE.get(lower, f"known are {', '.join(SCHEMES)}")
    _refuse(text, "P702", f"unknown scheme `{scheme}:`", 0, len(scheme), help=help_text)


def _parse_file(text: str, start: int) -> Reference:
    path = text[start:]
    if path.startswith("//"):
        if not path.startswith("///"):
            _refuse(
                text,
                "P701",
                "a file of another machine",
                start,
                help="write file:PATH, or file:///PATH from the root",
            )
        path = path[2:]
    _check_suffix(text, path, start)
    return Reference(text=text, scheme="file", url=path)


def _parse_git(text: str, scheme: str, start: int) -> Reference:
    form = "gh:owner/repo//path@revision" if scheme == "gh" else f"{scheme}:…//path@revision"
    begin = start
    if text.startswith("//", start):
        begin += 2
        while scheme == "git+file" and text.startswith("//", begin):
            begin += 1
    elif scheme in ("git+https", "git+http"):
        _refuse(text, "P701", "`//` and a host are missing", start, help=f"{scheme}://host/…")
    split = text.find("//", begin)
    if split < 0:
        _refuse(
            text, "P701", "`//` between repository and file is missing", begin, help=f"write {form}"
        )
    repository = text[start:split]
    rest = text[split + 2 :]
    path, at, revision = rest.rpartition("@")
    if not at:
        _refuse(
            text,
            "P704",
            "the revision is missing",
            len(text),
            help="end it with @ and a tag, a branch or a commit",
        )
    if scheme == "gh":
        if _OWNER.fullmatch(repository) is None or repository.endswith(".git"):
            hint = "write gh:owner/repo//path@revision"
            _refuse(text, "P701", "expected owner/repo", start, split, help=hint)
        url = repository
    elif scheme == "git+file":
        url = repository.removeprefix("//")
        if not url:
            _refuse(text, "P701", "the repository is missing", start, split)
    else:
        url = f"{scheme.removeprefix('git+')}:{repository}"
        _check_url(text, url.partition(":")[0], len("git+"), split)
    _check_path(text, path, split + 2)
    _check_revision(text, revision, len(text) - len(revision))
    return Reference(text=text, scheme=cast(Scheme, scheme), url=url, path=path, revision=revision)


def _check_url(text: str, scheme: str, start: int, end: int) -> None:
    url = text[start:end]
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        _refuse(text, "P701", f"no URL: {error}", start, end)
    if not host:
        _refuse(text, "P701", "the host is missing", start, end)
    if port == 0:
        _refuse(text, "P701", "port 0", start, end)
    if parts.username is not None or parts.password is not None:
        at = text.index("@", start)
        _refuse(
            text,
            "P703",
            "an account's name or password in a reference",
            text.index("//", start) + 2,
            at,
            help="it would be written into plans and locks; git's credential helpers keep them",
        )
    if scheme == "http" and host not in _LOOPBACK:
        where = text.index(host, start) if host in text else start
        _refuse(
            text,
            "P702",
            "http: without encryption",
            where,
            where + len(host),
            help=f"write https://{parts.netloc}{parts.path}; http: is only for this machine",
        )
    if parts.query or parts.fragment:
        at = min(at for at in (text.find("?"), text.find("#")) if at >= 0)
        _refuse(text, "P701", "a reference has no `?` and no `#`", at, at + 1)


def _check_path(text: str, path: str, start: int) -> None:
    if not path:
        _refuse(text, "P701", "the path of the file is missing", start)
    if path.startswith("/"):
        _refuse(text, "P705", "the path begins with `/`", start, start + 1)
    offset = start
    for part in path.split("/"):
        end = offset + len(part)
        if part in ("", ".", ".."):
            what = f"`{part}`" if part else "an empty part"
            _refuse(
                text,
                "P705",
                f"{what} in a path",
                offset,
                max(end, offset + 1),
                help="write the path from the repository's root, folder by folder",
            )
        if part.lower() == ".git" or part.startswith("-") or "%" in part or ":" in part:
            message = f"`{part}` is not taken as a part of a path"
            hint = "write the characters themselves, a blank too" if "%" in part else None
            _refuse(text, "P705", message, offset, end, help=hint)
        offset = end + 1
    _check_suffix(text, path, start)


def _check_suffix(text: str, path: str, start: int) -> None:
    if detect_kind(path) is None:
        name = path.rpartition("/")[2]
        suffixes = ", ".join(f".{kind}.toml" for kind in KINDS)
        _refuse(
            text,
            "P706",
            f"`{name}` is no document" if name else "the file's name is missing",
            start + len(path) - len(name),
            start + len(path),
            help=f"names of documents end in {suffixes}",
        )


def _check_revision(text: str, revision: str, start: int) -> None:
    end = start + len(revision)
    sound = _REVISION.fullmatch(revision) is not None and ".." not in revision
    if not revision:
        message = "the revision is missing"
        _refuse(text, "P704", message, start, help="a tag, a branch or a commit")
    if not sound or revision.endswith(("/", ".", ".lock")) or "//" in revision:
        _refuse(text, "P704", f"`{revision}` is no revision", start, end)
    if _SHORT_COMMIT.fullmatch(revision) and any(char.isdigit() for char in revision):
        message = "a shortened commit may become ambiguous"
        _refuse(text, "P704", message, start, end, help="write all 40 digits, or a tag")


NAME = "reference"
"""Name of the source that diagnostics about references point into."""


def _refuse(
    text: str, code: str, message: str, start: int, end: int | None = None, help: str | None = None
) -> NoReturn:
    last = len(text) if end is None else end
    span = Span(NAME, 1, start + 1, 1, max(last, start + 1) + 1)
    found = Diagnostic(code=code, message=message, help=help, span=span)
    raise UserError([found], exit_code=2, sources={NAME: text})


def locate_repository(reference: Reference, github: str, base: Path) -> str:
    """URL that git fetches ``reference`` from; paths are relative to ``base``."""
    if reference.scheme == "gh":
        return f"{github}/{reference.url}"
    if reference.scheme == "git+file":
        place = base / reference.url
        # People write blanks as addresses have them, too.
        decoded = base / unquote(reference.url)
        return (place if place.exists() else decoded).resolve().as_uri()
    return reference.url


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
