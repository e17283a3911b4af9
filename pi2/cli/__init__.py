"""The command line."""

import gc
import os

_USUAL = gc.get_threshold()


def put_off_collection() -> None:
    """Collect rarely while a command starts: imports make many lasting objects."""
    gc.set_threshold(100_000, 20, 20)


def collect_as_usual() -> None:
    """Collect as Python usually does from now on, except for objects that exist already."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


put_off_collection()
# pydantic would look through all installed packages for plugins, 0.03 s.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
