"""Logs: where they go and what they look like."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from pi2.logging import configure_logging, get_logger


@pytest.fixture(autouse=True)
def _forget_configuration() -> Iterator[None]:
    """Leave structlog as it was found."""
    yield
    structlog.reset_defaults()


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_json_where_nobody_reads_along() -> None:
    stream = io.StringIO()
    configure_logging(1, stream=stream)
    get_logger(plan_digest="abc").info("loaded", layers=8)
    line = json.loads(stream.getvalue())
    assert line["event"] == "loaded"
    assert (line["plan_digest"], line["layers"], line["level"]) == ("abc", 8, "info")
    assert line["timestamp"].endswith("Z")


def test_text_for_people_on_a_terminal() -> None:
    stream = Terminal()
    configure_logging(1, stream=stream)
    get_logger().info("loaded")
    assert "loaded" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(
    ("verbosity", "seen"),
    [(0, ["warning"]), (1, ["warning", "info"]), (2, ["warning", "info", "debug"]), (9, None)],
)
def test_more_v_show_more(verbosity: int, seen: list[str] | None) -> None:
    stream = io.StringIO()
    configure_logging(verbosity, stream=stream)
    logger = get_logger()
    logger.warning("x")
    logger.info("x")
    logger.debug("x")
    levels = [json.loads(line)["level"] for line in stream.getvalue().splitlines()]
    assert levels == (seen or ["warning", "info", "debug"])


def test_exceptions_do_not_carry_local_variables() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    prompt = "a secret"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        get_logger().exception("failed")
    assert "ValueError" in stream.getvalue()
    assert "a secret" not in stream.getvalue()
