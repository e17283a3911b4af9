"""Whether a lock, its references and the files that are here agree."""

from __future__ import annotations

import os
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.plan.toml.source import display_path
from pi2.sharing.cache import Cache, read_regular, report_tampering
from pi2.sharing.files import hash_bytes
from pi2.sharing.lock import Lock, Source
from pi2.sharing.references import Reference
from pi2.sharing.settings import TAP, Settings


def is_below(path: Path, folder: Path) -> bool:
    """Whether ``path`` lies inside ``folder``."""
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


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


def find_copy(source: Source, lock: Lock, cache: Cache) -> Path | None:
    """The file of a locked source: the repository's copy, else the cache's; None if neither is
    here.  `UserError` P713 where bytes are not those that were locked, P711 for a path that leads
    out of the repository."""
    if source.vendored:
        path = lock.folder / source.vendored
        inside = is_below(path.resolve(), lock.folder.resolve())
        if os.path.isabs(source.vendored) or not inside:
            raise UserError.of(
                "P711",
                f"the copy of `{source.reference}` lies outside: {source.vendored}",
                file=display_path(lock.path),
            )
        data = read_regular(path)
        if data is not None:
            if hash_bytes(data) != source.sha256:
                raise report_tampering(path, source.sha256)
            return path
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
    elif reference.scheme == "tap":
        same = same and source.path == f"devices/{reference.path}.device.toml"
    if reference.names_commit:
        same = same and source.revision == reference.revision
    if not same:
        what = " ".join(item for item in (source.url, source.path, source.revision[:12]) if item)
        raise _report_drift(reference, lock, f"it is locked to {what}")


def check_drift(reference: Reference, source: Source, lock: Lock, settings: Settings) -> None:
    """Refuse what this machine shows to be out of date, P714: files, local repositories, the tap.

    Reads this machine only.
    """
    from pi2.sharing.fetching import ask_revision, find_place, read_local

    if reference.scheme == "tap":
        if settings.tap is not None:  # without one, the lock says it all
            place = find_place(reference, base=lock.folder, settings=settings)
            if place.url != source.url:
                what = f"{TAP} is {place.url}, locked is {source.url}"
                raise _report_drift(reference, lock, what)
        return
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
