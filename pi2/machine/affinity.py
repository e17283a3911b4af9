"""Binding threads to cores, where the system can."""

from __future__ import annotations

import os
from collections.abc import Iterable


def list_allowed_cores() -> list[int]:
    """Return the cores that the calling thread may use; empty where threads cannot be bound."""
    ask = getattr(os, "sched_getaffinity", None)
    try:
        return [] if ask is None else sorted(ask(0))
    except OSError:  # a sandbox that forbids the question
        return []


def bind_calling_thread(cores: Iterable[int]) -> None:
    """Let the calling thread run on ``cores`` only; threads that it starts inherit them."""
    os.sched_setaffinity(0, cores)
