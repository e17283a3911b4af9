"""From a reference to bytes, wherever they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pi2.diagnostics import UserError
from pi2.plan.toml.source import MAX_BYTES
from pi2.sharing.cache import read_regular
from pi2.sharing.git import Revision, RevisionKind, read_git_file, resolve_revision
from pi2.sharing.references import Reference, locate_repository
from pi2.sharing.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Place:
    """Target of a reference, with the settings applied."""

    url: str
    """Address of the repository or file."""
    path: str = ""
    """File inside the repository."""
    revision: str = ""
    """Tag, branch or commit to ask for."""

    @property
    def is_git(self) -> bool:
        """Whether it is a file of a repository."""
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is read without a network."""
        return self.url.startswith("file:")

    @property
    def file_name(self) -> str:
        """Name of the document's file."""
        return (self.path or unquote(urlsplit(self.url).path)).rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A file that was fetched."""

    data: bytes
    place: Place
    commit: str = ""
    kind: RevisionKind | None = None


def find_place(reference: Reference, *, base: Path, settings: Settings) -> Place:
    """Apply the settings; relative paths begin at ``base``."""
    if reference.is_git:
        url = locate_repository(reference, settings.github, base)
        return Place(url=url, path=reference.path, revision=reference.revision)
    if reference.scheme == "file":
        return Place(url=(base / reference.url).absolute().as_uri())
    return Place(url=reference.url)


def refuse_network(place: Place, offline: bool) -> None:
    """Raise `UserError` P730 where a network would be needed and may not be used."""
    if offline and not place.is_local:
        raise UserError.of(
            "P730",
            f"{place.url} would have to be fetched",
            help="run it once without --offline",
        )


def fetch(place: Place, *, settings: Settings, offline: bool) -> Fetched:
    """Fetch the file at ``place``; nothing is written."""
    refuse_network(place, offline)
    if place.is_git:
        found = read_git_file(place.url, place.path, place.revision, timeout_s=settings.timeout_s)
        return Fetched(data=found.data, place=place, commit=found.commit, kind=found.kind)
    if place.is_local:
        return Fetched(data=read_local(Path(unquote(urlsplit(place.url).path))), place=place)
    from pi2.sharing.web import fetch_url

    return Fetched(data=fetch_url(place.url, timeout_s=settings.timeout_s), place=place)


def ask_revision(place: Place, *, settings: Settings, offline: bool) -> Revision:
    """What the revision of ``place`` means now."""
    refuse_network(place, offline)
    return resolve_revision(place.url, place.revision, timeout_s=settings.timeout_s)


def read_local(path: Path) -> bytes:
    """Bytes of a file of this machine; `UserError` P722, P724 or P725."""
    if path.is_symlink():
        raise UserError.of(
            "P724", "is a symbolic link", file=str(path), help="name the file itself"
        )
    data = read_regular(path)
    if data is None:
        raise UserError.of("P725", "no such file that can be read", file=str(path))
    if len(data) > MAX_BYTES:
        raise UserError.of(
            "P722",
            f"is larger than {MAX_BYTES:,} bytes",
            file=str(path),
            help="documents are small texts",
        )
    return data
