"""Logs: where they go and what they look like."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from pi2.logging import configure_logging, get_logger

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _forget_configuration() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class Terminal(io.StringIO):
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


def test_text_for_people_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_colour in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_colour)
        stream = Terminal()
        configure_logging(1, stream=stream)
        get_logger().info("loaded", layers=8)
        text = stream.getvalue()
        assert "loaded" in text and not text.startswith("{")
        assert ("\x1b" not in text and "layers=8" in text) or not no_colour


def run_on_terminal(*arguments: str) -> str:
    parent, child = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "pi2", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=child,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
    ) as process:
        os.close(child)
        pieces = []
        while True:
            try:
                piece = os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            pieces.append(piece)
    os.close(parent)
    assert process.returncode == 0
    return b"".join(pieces).decode()


DRY = ["plans/demo.plan.toml", "--prompt", "x", "--max-tokens", "2", "--set", "backends.cpu=null"]


def test_a_terminal_gets_lines_for_people_and_more_of_them_with_vv() -> None:
    once, twice = run_on_terminal("run", "-v", *DRY), run_on_terminal("run", "-vv", *DRY)
    assert "{" not in once.split("\r\n")[0] and "model loaded" in once
    assert "segment=hot" not in once
    assert "segment=hot" in twice and "layer=7" in twice
    assert "cache_misses=" in twice


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
    assert "ValueError" in stream.getvalue() and "a secret" not in stream.getvalue()
