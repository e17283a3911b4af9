"""Logs of a bundle: a line each, on standard error."""

import logging
import sys
from typing import Any

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)

_chosen = [logging.WARNING]


def configure_logging(verbosity: int = 0) -> None:
    _chosen[0] = _LEVELS[min(max(verbosity, 0), len(_LEVELS) - 1)]


class _Logger:
    def __init__(self, bound: dict[str, Any]) -> None:
        self._bound = bound

    def _say(self, level: int, name: str, event: str, facts: dict[str, Any]) -> None:
        if level >= _chosen[0]:
            words = [f"{key}={value}" for key, value in {**self._bound, **facts}.items()]
            print(name, event, *words, file=sys.stderr)

    def debug(self, event: str, **facts: Any) -> None:
        self._say(logging.DEBUG, "debug:", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        self._say(logging.INFO, "info:", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._say(logging.WARNING, "warning:", event, facts)


def get_logger(**bound: Any) -> _Logger:
    """Make a logger whose every line has ``bound``."""
    return _Logger(bound)
