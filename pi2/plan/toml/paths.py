"""Key paths: where in a document something stands."""

from __future__ import annotations

from collections.abc import Sequence

KeyPath = tuple[str | int, ...]
"""Keys and array indices from the root, such as ``("layers", "overrides", 0, "select")``."""


EVERY_ITEM = -1
"""Stands in the place of an index for every item of the array, written ``[]``."""
EVERY_NAME = "*"
"""Stands in the place of a name of the user's for every name of the table."""


def format_path(path: Sequence[str | int]) -> str:
    """Write a key path for people: ``layers.overrides[0].select``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += "[]" if part == EVERY_ITEM else f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def name_path(path: KeyPath) -> str | None:
    """Key path for a diagnostic, None for the document itself."""
    return format_path(path) or None
