"""Logs on stderr: lines on a terminal, JSON elsewhere; structlog is imported on demand.

A bundle for phones has no structlog: the standard library writes its lines."""

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from structlog.typing import Processor

_LEVELS = (30, 20, 10)
"""WARNING, INFO and DEBUG, by the number of ``-v``."""


def configure_logging(verbosity: int = 0, *, stream: TextIO | None = None) -> None:
    """Send logs to ``stream`` (stderr unless given): warnings, with ``-v`` also what happens, with
    ``-vv`` also every detail."""
    target = sys.stderr if stream is None else stream
    least = _LEVELS[min(max(verbosity, 0), len(_LEVELS) - 1)]
    if not _has_structlog():
        import logging

        logging.basicConfig(level=least, stream=target, format="%(levelname)s: %(message)s")
        return
    import structlog

    human = target.isatty()
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if human else "iso", utc=not human),
    ]
    if human:
        processors.append(structlog.dev.ConsoleRenderer(colors=wants_colour(target)))
    else:
        processors += [
            # Without locals: they would put prompts into logs.
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(default=str),
        ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        # Standard error may be another one when something is said: whoever embeds pi2 redirects it.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr if stream is None else stream),
        cache_logger_on_first_use=False,
    )


@cache
def _has_structlog() -> bool:
    try:
        return find_spec("structlog") is not None
    except ImportError:  # an importer that refuses it
        return False


def wants_colour(stream: TextIO) -> bool:
    """Colours are for terminals only, and not for those who set NO_COLOR."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not is_plain and stream.isatty()


class Logger:
    """Lines that carry ``bound``. structlog takes 6 MiB: only runs with log lines import it."""

    def __init__(self, bound: Mapping[str, Any]) -> None:
        self._bound = bound

    def debug(self, event: str, **values: Any) -> None:
        self._say("debug", event, values)

    def info(self, event: str, **values: Any) -> None:
        self._say("info", event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._say("warning", event, values)

    def error(self, event: str, **values: Any) -> None:
        self._say("error", event, values)

    def exception(self, event: str, **values: Any) -> None:
        """Say what failed, with the exception that is being handled."""
        self._say("exception", event, values)

    def _say(self, level: str, event: str, values: Mapping[str, Any]) -> None:
        if not _has_structlog():
            import logging

            facts = (f"{key}={value}" for key, value in {**self._bound, **values}.items())
            getattr(logging.getLogger("pi2"), level)(" ".join((event, *facts)))
            return
        if "structlog" not in sys.modules and level in ("debug", "info"):
            return  # nobody has asked for more than warnings
        import structlog

        if not structlog.is_configured():
            configure_logging()
        getattr(structlog.get_logger(**self._bound), level)(event, **values)


def get_logger(**bound: Any) -> Logger:
    """Make a logger whose every line carries ``bound``, such as ``plan_digest`` or ``layer``."""
    return Logger(bound)
