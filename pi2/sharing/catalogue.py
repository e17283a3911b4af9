"""Devices to choose from: those that pi2 ships and those of the default tap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pi2.diagnostics.text import escape_controls
from pi2.plan.reading.references import list_shipped
from pi2.plan.toml.source import parse_source
from pi2.sharing.fetching import Place, find_tap, refuse_network
from pi2.sharing.git import read_git_folder
from pi2.sharing.project import Project
from pi2.sharing.references import is_tap_name, locate_repository

SUFFIX = ".device.toml"


@dataclass(frozen=True)
class Row:
    """A device of the catalogue."""

    reference: str
    """Reference that a plan writes."""
    name: str
    """Display name of the device."""
    description: str


def search_profiles(project: Project, words: Sequence[str]) -> list[Row]:
    """Devices whose name or description has every word; the tap is asked if there is one."""
    rows = [*_list_shipped(), *(_list_tap(project) if project.settings.tap else ())]
    return [row for row in rows if all(_has_word(row, word) for word in words)]


def _has_word(row: Row, word: str) -> bool:
    text = f"{row.reference} {row.name} {row.description}".casefold()
    return word.casefold() in text


def _list_shipped() -> Iterator[Row]:
    for name, path in list_shipped("device").items():
        yield _describe(name, path.read_bytes())


def _list_tap(project: Project) -> Iterator[Row]:
    tap = find_tap(project.settings)
    url = locate_repository(tap, project.settings.github, Path.cwd())
    refuse_network(Place(url=url), project.offline)
    _, files = read_git_folder(
        url, "devices", SUFFIX, tap.revision, timeout_s=project.settings.timeout_s
    )
    for name, data in files.items():
        short = name.removesuffix(SUFFIX)
        if is_tap_name(short):
            yield _describe(f"tap:{short}", data)


def _describe(reference: str, data: bytes) -> Row:
    """A row; a file that cannot be read has no name, and `add` says why."""
    text = data.decode("utf-8", errors="replace")
    source = parse_source(Path(reference), reference, text)
    values = {} if isinstance(source, list) else source.values
    return Row(
        reference=reference,
        name=_one_line(values.get("name")),
        description=_one_line(values.get("description")),
    )


def _one_line(text: object) -> str:
    return escape_controls(" ".join(text.split())[:200]) if isinstance(text, str) else ""
