"""References while plans are read: ``pi2.lock`` and the cache, never a network."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.diagnostics import UserError
from pi2.plan.reading.references import LOCK, Located, has_scheme
from pi2.plan.toml.source import Kind, detect_kind, display_path

if TYPE_CHECKING:
    from pi2.sharing.fetching import Settings
    from pi2.sharing.lock import Lock


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
        from pi2.sharing.references import parse_reference

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
    from pi2.sharing.references import parse_reference

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
