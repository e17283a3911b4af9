"""The system's read-ahead for mapped files, which decides how fast an engine is that maps its
weights: a long one suits dense models, a short one mixtures, whose experts lie apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DENSE_KIB, MIXTURE_KIB = 8192, 128
"""A long one and a short one.  llama.cpp ran mixtures larger than memory six times as fast with
the short one as with the system's 8 MiB; others in between were not tried."""


def find_setting(path: Path) -> Path | None:
    """The file of the system that says how much is read ahead of ``path``; None if there is none
    that this program may write."""
    number = os.stat(path).st_dev
    found = Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb")
    return found if os.access(found, os.W_OK) else None


@contextmanager
def set_read_ahead(path: Path, kib: int | None) -> Iterator[None]:
    """Read so far ahead of files beside ``path`` meanwhile; None leaves the system's."""
    setting = None if kib is None else find_setting(path)
    if setting is None:
        yield
        return
    before = setting.read_text()
    setting.write_text(str(kib))
    try:
        yield
    finally:
        setting.write_text(before)
