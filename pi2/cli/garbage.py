"""How often Python looks for garbage: objects that only keep each other."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def put_off_collection() -> None:
    """Collect rarely while a command starts: imports make many lasting objects."""
    gc.set_threshold(100_000, 20, 20)


def collect_as_usual() -> None:
    """Collect as Python usually does from now on, except for objects that exist already."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
