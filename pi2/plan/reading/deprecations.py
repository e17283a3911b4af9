"""Documents of older versions, renamed and deleted keys: read with a warning; `pi2 migrate`."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import tomli

from pi2.diagnostics import Diagnostic
from pi2.plan.reading.references import DOCUMENTS
from pi2.plan.toml.source import Kind, SourceFile
from pi2.plan.toml.text import KeyPath, write_value

Step = Callable[[MutableMapping[str, Any], Kind], None]
"""Changes a document of one version into one of the next, but for ``schema_version``."""


def divide_layers(document: MutableMapping[str, Any], kind: Kind) -> None:
    """Version 2: ``layers.split`` divides each layer between units that compute at the same time,
    and ``decode.phases`` is called ``decode.passes``. Every other key keeps its meaning."""
    del document, kind


def name_weights(document: MutableMapping[str, Any], kind: Kind) -> None:
    """Version 3: a plan's ``store`` is called ``weights`` (see `RENAMES`), as a GGUF file's path
    was; what version 2 required is derived unless it is stated."""
    if kind != "plan":
        return
    if {"store", "weights"} <= document.keys():
        del document["store"]
    removed = document.get("remove")
    if isinstance(removed, list) and "store" in removed:
        removed[removed.index("store")] = "weights"


STEPS: Mapping[int, Step] = {1: divide_layers, 2: name_weights}
"""Steps by the version that they begin with."""


def is_old(version: object, kind: Kind) -> TypeGuard[int]:
    """Whether ``schema_version`` is an old version of a ``kind`` of document."""
    return type(version) is int and 1 <= version < DOCUMENTS[kind].VERSION


ANY = "*"
"""Stands for any key, or any entry of an array."""


@dataclass(frozen=True, kw_only=True)
class Rename:
    """A key that is called ``new`` now, or that is gone, as renames.toml states it."""

    kind: Kind
    path: tuple[str, ...]
    new: str | None = None
    reason: str
    value: object = None
    since: int = 1

    @property
    def old(self) -> str:
        return self.path[-1]


def _read_renames() -> Iterator[Rename]:
    text = Path(__file__).with_name("renames.toml").read_text("utf-8")
    tables: dict[Kind, list[dict[str, Any]]] = tomli.loads(text)  # type: ignore[assignment]
    for kind, renames in tables.items():
        for table in renames:
            yield Rename(kind=kind, path=tuple(table.pop("key").split(".")), **table)


RENAMES = tuple(_read_renames())


def modernise(source: SourceFile, kind: Kind) -> tuple[SourceFile, list[Diagnostic]]:
    """Return the file as it would be written now, with warnings about old parts."""
    own = [item for item in RENAMES if item.kind == kind and item.old in source.text]
    version = source.values.get("schema_version")
    if not is_old(version, kind) and not any(any(find_old_keys(source.values, r)) for r in own):
        return source, []
    values = copy.deepcopy(source.values)
    warnings: list[Diagnostic] = []
    aliases: dict[KeyPath, KeyPath] = {}
    if is_old(version, kind):
        newest = DOCUMENTS[kind].VERSION
        for number in range(version, newest):
            STEPS[number](values, kind)
        values["schema_version"] = newest
        warnings.append(
            source.report(
                "P109",
                ("schema_version",),
                f"the file is written in version {version} of the plan language, "
                f"{newest} is the present one",
                "upgrade it with `pi2 migrate`",
                severity="warning",
            )
        )
    for path, item in [(path, rename) for rename in own for path in find_old_keys(values, rename)]:
        table: Any = values
        for part in path[:-1]:
            table = table[part]
        if item.new is None:
            del table[item.old]
            shown = item.old if item.value is None else f"{item.old} = {write_value(item.value)}"
            message = f"`{shown}` is ignored, it no longer exists: {item.reason}"
            advice = "delete it, or let `pi2 migrate` do it"
        else:
            renamed = {item.new if key == item.old else key: value for key, value in table.items()}
            table.clear()
            table.update(renamed)
            aliases[(*path[:-1], item.new)] = path
            message = f"`{item.old}` is called `{item.new}` now: {item.reason}"
            advice = f"write `{item.new}`, or let `pi2 migrate` do it"
        if is_old(version, kind) and version < item.since:
            continue
        span = source.spans.find_key(path)
        finding = source.report("P109", path, message, advice, severity="warning", span=span)
        warnings.append(finding)
    return replace(source, values=values, aliases=aliases), warnings


def find_old_keys(values: Any, rename: Rename) -> Iterator[KeyPath]:
    """Paths of the old key; if the file has the new one as well, the old one remains and is
    reported as unknown."""
    places: list[tuple[KeyPath, Any]] = [((), values)]
    for part in rename.path[:-1]:
        below: list[tuple[KeyPath, Any]] = []
        for path, item in places:
            if isinstance(item, dict) and part == ANY:
                below += [((*path, key), value) for key, value in item.items()]
            elif isinstance(item, dict) and part in item:
                below.append(((*path, part), item[part]))
            elif isinstance(item, list) and part == ANY:
                below += [((*path, index), value) for index, value in enumerate(item)]
        places = below
    for path, item in places:
        if not isinstance(item, dict) or rename.old not in item or rename.new in item:
            continue
        if rename.value is None or item[rename.old] == rename.value:
            yield (*path, rename.old)
