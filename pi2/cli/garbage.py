"""How often Python looks for garbage: objects that only keep each other."""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def put_off_collection() -> None:
    """Hardly ever look, while a command begins: imports make many objects that stay, and looking
    for garbage among them takes a tenth of the time."""
    gc.set_threshold(100_000, 20, 20)


def collect_as_usual() -> None:
    """Look as often as Python does by itself from now on, but for what there is already: a command
    that runs for days would keep whatever nobody needs any more."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
