"""Documents in folders: what a command means that is given a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pi2.plan.toml.source import detect_kind


def list_documents(paths: Iterable[str | Path]) -> list[Path]:
    """Files as they are, and in the place of a folder all documents below it, sorted.

    Folders that begin with a dot, such as ``.git``, are left out; a folder without documents stays
    in the list, so that it is reported.  No file comes twice.
    """
    found: dict[Path, None] = {}
    for item in paths:
        path = Path(item)
        documents = sorted(_walk(path)) if path.is_dir() else []
        found.update(dict.fromkeys(documents or [path]))
    return list(found)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if detect_kind(name) is not None)
