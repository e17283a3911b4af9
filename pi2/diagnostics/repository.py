"""What services call a file: its path in the repository, wherever pi2 was started."""

from __future__ import annotations

import os
from pathlib import Path

MARKS = (".git", ".hg", "pi2.lock")
"""A folder that has one of them is the top of a repository.  An earlier one counts more: there may
be several folders with a lock in a repository."""


def name_in_repository(file: str) -> str | None:
    """The path of ``file`` from the top of its repository, with ``/``; None outside of any.

    ``file`` is what findings call it: a path from the working directory, or a whole one.
    """
    try:
        path = Path(os.path.abspath(file))
    except ValueError:  # a name that no file has
        return None
    for mark in MARKS:
        for folder in path.parents:
            if _exists(folder / mark):
                return path.relative_to(folder).as_posix()
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
