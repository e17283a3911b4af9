"""``pi2.lock``: which bytes each reference means, written by `pi2 profile` and, for weights of the
hub, `pi2 pull`; committed by people.

Sources are sorted by reference: two branches that add different ones merge.  The lock is the
nearest ``pi2.lock`` at or above a document's folder, as far as its repository reaches."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from pi2.diagnostics import Diagnostic, UserError
from pi2.plan.documents.common import Table
from pi2.plan.reading.references import LOCK, read_document
from pi2.plan.toml.source import SourceFile, display_path
from pi2.plan.toml.text import format_path, write_value
from pi2.sharing.fetching import Cache, Settings, hash_bytes, read_local, write_atomically
from pi2.sharing.git import resolve_revision
from pi2.sharing.references import Reference

LOCK_VERSION = 1

_HEADER = """\
# Written by `pi2 profile` and `pi2 pull`; commit it, and let pi2 change it.
"""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Source(Table):
    reference: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    """The reference as documents write it; paths of files are relative to the lock's folder."""
    url: Annotated[str, StringConstraints(min_length=1, max_length=1000)]
    """Repository or file that it was fetched from."""
    path: Annotated[str, StringConstraints(max_length=500)] = ""
    """File inside the repository."""
    revision: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})?$")] = ""
    """Commit; empty for files that are of no repository."""
    revision_kind: Literal["tag", "branch", "commit"] | None = None
    """Kind of the reference's revision: tag, branch or commit."""
    size_bytes: Annotated[int, Field(ge=0)]
    """Length of the file."""
    sha256: Sha256
    """Digest of the file."""

    @property
    def file_name(self) -> str:
        return (self.path or self.url.removeprefix("file:")).rpartition("/")[2]


class PinnedWeights(Table):
    """A file of weights on the hub, as it was pulled."""

    reference: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    """The reference as plans write it."""
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
    """Commit of the repository."""
    size_bytes: Annotated[int, Field(ge=0)]
    """Length of the file."""
    sha256: Sha256
    """Digest of the file."""


class _LockFile(Table):
    lock_version: int
    sources: tuple[Source, ...] = ()
    weights: tuple[PinnedWeights, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock file's contents and its place."""

    path: Path
    sources: tuple[Source, ...] = ()
    weights: tuple[PinnedWeights, ...] = ()

    @property
    def folder(self) -> Path:
        return self.path.parent

    def find(self, reference: str) -> Source | None:
        return next((item for item in self.sources if item.reference == reference), None)

    def replace(self, *sources: Source) -> Lock:
        """The lock with ``sources`` instead of earlier ones of the same reference."""
        known = {item.reference: item for item in (*self.sources, *sources)}
        ordered = tuple(known[reference] for reference in sorted(known))
        return replace(self, sources=ordered)

    def find_weights(self, reference: str) -> PinnedWeights | None:
        return next((item for item in self.weights if item.reference == reference), None)

    def pin(self, weights: PinnedWeights) -> Lock:
        """The lock with ``weights`` in place of an entry of the same reference."""
        others = [item for item in self.weights if item.reference != weights.reference]
        return replace(self, weights=(*others, weights))


def find_lock(folder: Path) -> Path | None:
    """The nearest lock at or above ``folder``; the search ends at the repository's root."""
    for place in _list_folders(folder):
        if os.path.isfile(place / LOCK):
            return place / LOCK
        if os.path.lexists(place / ".git"):
            return None
    return None


def _list_folders(folder: Path) -> list[Path]:
    """The folder and those above it; none where the working directory is gone."""
    try:
        whole = folder.absolute()
    except OSError:
        return []
    return [whole, *whole.parents]


def choose_lock(folder: Path) -> Path:
    """Path of the lock for ``folder``, which may not exist yet: else at the repository's root."""
    found = find_lock(folder)
    if found is not None:
        return found
    for place in _list_folders(folder):
        if os.path.lexists(place / ".git"):
            return place / LOCK
    return folder / LOCK


def read_lock(path: Path) -> Lock:
    """Read a lock; one that is not there is empty.  `UserError` P711 or P712 if it is damaged."""
    if not os.path.lexists(path):
        return Lock(path=path)
    name = display_path(path)
    source = read_document(path, name, LOCK)
    if isinstance(source, list):
        raise UserError(source, exit_code=2)
    version = source.values.get("lock_version")
    if type(version) is int and version > LOCK_VERSION:
        message = f"the lock has version {min(version, 10**9)}, this pi2 knows {LOCK_VERSION}"
        raise _make_error(source, "P712", message, ("lock_version",), "upgrade pi2")
    listed = source.values.get("sources")
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, dict):
            item.pop("vendored", None)  # a copy that older versions kept: the cache has its bytes
    try:
        read = _LockFile.model_validate_json(json.dumps(source.values, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = format_path(first["loc"])
        message = f"the lock is damaged: `{where}`: {first['msg'].lower()}"
        help_text = "take it back from your version control, or delete it and add again"
        raise _make_error(source, "P711", message, first["loc"], help_text) from None
    for number, item in enumerate(read.sources):
        if any(other.reference == item.reference for other in read.sources[:number]):
            message = f"the lock has `{item.reference}` twice"
            path_there = ("sources", number, "reference")
            raise _make_error(source, "P711", message, path_there, "keep one of them")
    return Lock(path=path, sources=read.sources, weights=read.weights)


def _make_error(
    source: SourceFile, code: str, message: str, path: tuple[str | int, ...], help_text: str
) -> UserError:
    span = source.spans.find_value(path)
    found = Diagnostic(
        code=code, message=message, help=help_text, span=span, path=format_path(path)
    )
    return UserError([found], exit_code=2, sources={source.name: source.text})


def format_lock(lock: Lock) -> str:
    """The lock's text: the same sources give the same bytes."""
    parts = [f"{_HEADER}lock_version = {LOCK_VERSION}\n"]
    tables: dict[str, Sequence[Source | PinnedWeights]]
    tables = {"sources": lock.sources, "weights": lock.weights}
    for name, items in tables.items():
        for item in sorted(items, key=lambda item: item.reference):
            values = item.model_dump(mode="json", exclude_defaults=True)
            lines = [f"{key} = {write_value(value)}\n" for key, value in values.items()]
            parts.append("".join([f"[[{name}]]\n", *lines]))
    return "\n".join(parts)


@contextmanager
def edit_lock(path: Path) -> Iterator[_Edit]:
    """Edit the lock exclusively; write it at the end if it changed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise UserError.of("P003", message, file=display_path(path)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        edit = _Edit(read_lock(path))
        before = edit.lock
        yield edit
        if edit.lock != before:
            write_atomically(path, format_lock(edit.lock).encode("utf-8"))
    finally:
        os.close(descriptor)


class _Edit:
    def __init__(self, lock: Lock) -> None:
        self.lock = lock


def name_in_lock(reference: Reference, base: Path, folder: Path) -> str:
    """The reference as the lock writes it: paths relative to ``folder`` instead of ``base``."""
    if not reference.is_local or os.path.isabs(reference.url):
        return reference.text
    url = Path(os.path.relpath(base.absolute() / reference.url, folder.absolute())).as_posix()
    if reference.scheme == "file":
        return f"file:{url}"
    return f"git+file:{url}//{reference.path}@{reference.revision}"


def find_copy(source: Source, cache: Cache) -> Path | None:
    """The cached file of a locked source, None if absent; `UserError` P713 for other bytes."""
    return cache.find(source.sha256, source.file_name)


def require_copy(source: Source, cache: Cache) -> Path:
    """The cached file of a locked source; `UserError` P715 if it is absent, P713."""
    path = find_copy(source, cache)
    if path is None:
        raise UserError.of(
            "P715",
            f"`{source.reference}` is locked, but its file is not here",
            help="`pi2 profile add` fetches locked files",
        )
    return path


def check_agreement(reference: Reference, source: Source, lock: Lock) -> None:
    """Refuse a lock whose entry leads elsewhere than its reference says: P714."""
    same = True
    if reference.scheme == "gh":
        same = source.url.endswith(f"/{reference.url}")
    elif reference.scheme in ("git+https", "git+http", "https", "http"):
        same = source.url == reference.url
    if reference.is_git:
        same = same and source.path == reference.path
    if reference.names_commit:
        same = same and source.revision == reference.revision
    if not same:
        what = " ".join(item for item in (source.url, source.path, source.revision[:12]) if item)
        raise _report_drift(reference, lock, f"it is locked to {what}")


def check_drift(reference: Reference, source: Source, lock: Lock, settings: Settings) -> None:
    """Refuse local files and repositories that differ from the lock: P714."""
    if not reference.is_local or not (lock.folder / reference.url).exists():
        return
    if reference.scheme == "file":
        if hash_bytes(read_local(lock.folder / reference.url)) != source.sha256:
            raise _report_drift(reference, lock, "the file was changed")
        return
    url = reference.locate(settings.github, lock.folder)
    now = resolve_revision(url, reference.revision, timeout_s=settings.timeout_s)
    if now.commit != source.revision:
        what = f"`{reference.revision}` is {now.commit[:12]}, locked is {source.revision[:12]}"
        raise _report_drift(reference, lock, what)


def _report_drift(reference: Reference, lock: Lock, what: str) -> UserError:
    return UserError.of(
        "P714",
        f"`{reference.text}` is not what {display_path(lock.path)} says: {what}",
        help="`pi2 profile update` locks what there is now",
    )
