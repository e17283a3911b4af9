"""Whether a lock, its references and the files that are here agree."""

from __future__ import annotations

import os
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.plan.toml.source import display_path
from pi2.sharing.cache import Cache
from pi2.sharing.files import hash_bytes
from pi2.sharing.lock import Lock, Source
from pi2.sharing.references import Reference
from pi2.sharing.settings import Settings


def name_in_lock(reference: Reference, base: Path, folder: Path) -> str:
    """The reference as the lock writes it: relative paths begin at the lock's ``folder``.

    ``base`` is the folder that they begin at as they are given.
    """
    if not reference.is_local or os.path.isabs(reference.url):
        return reference.text
    url = Path(os.path.relpath(base.absolute() / reference.url, folder.absolute())).as_posix()
    if reference.scheme == "file":
        return f"file:{url}"
    return f"git+file:{url}//{reference.path}@{reference.revision}"


def find_copy(source: Source, cache: Cache) -> Path | None:
    """The file of a locked source in the cache; None if it is not there.  `UserError` P713 where
    bytes are not those that were locked."""
    if cache.read(source.sha256, source.file_name) is None:
        return None
    return cache.find_path(source.sha256, source.file_name)


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
    """Refuse what this machine shows to be out of date, P714: files and local repositories.

    Reads this machine only.
    """
    from pi2.sharing.fetching import ask_revision, find_place, read_local

    if not reference.is_local or not (lock.folder / reference.url).exists():
        return
    if reference.scheme == "file":
        if hash_bytes(read_local(lock.folder / reference.url)) != source.sha256:
            raise _report_drift(reference, lock, "the file was changed")
        return
    place = find_place(reference, base=lock.folder, settings=settings)
    now = ask_revision(place, settings=settings, offline=True)
    if now.commit != source.revision:
        what = f"`{place.revision}` is {now.commit[:12]}, locked is {source.revision[:12]}"
        raise _report_drift(reference, lock, what)


def _report_drift(reference: Reference, lock: Lock, what: str) -> UserError:
    return UserError.of(
        "P714",
        f"`{reference.text}` is not what {display_path(lock.path)} says: {what}",
        help="`pi2 profile update` locks what there is now",
    )
