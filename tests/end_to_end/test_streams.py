"""Standard streams that are closed, full or no text: exit code 2 and a line, never P900."""

import os
import pty
import subprocess
import sys
import tty
from pathlib import Path

import pytest

from pi2.cli.run import is_control, show_controls
from tests.helpers.patience import PATIENCE_S

PLAN = Path(__file__).resolve().parents[2] / "plans/demo.plan.toml"


def call(arguments: str, redirections: str) -> subprocess.CompletedProcess[str]:
    """Run pi2 in a shell, standard input empty unless redirected."""
    return subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m pi2 {arguments} {redirections}'],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", ["--help", f"show {PLAN}", "explain P101", f"run {PLAN} --prompt a --max-tokens 2"]
)
@pytest.mark.parametrize(
    ("redirection", "reason"),
    [("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")],
)
def test_output_that_cannot_be_written_is_a_finding(
    arguments: str, redirection: str, reason: str
) -> None:
    done = call(arguments, redirection)
    assert done.returncode == 2
    assert f"error[P631]: cannot write standard output: {reason}" in done.stderr
    assert done.stderr.count("error") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full"])
def test_messages_that_cannot_be_shown_change_nothing(redirection: str) -> None:
    done = call(f"run {PLAN} --prompt a --max-tokens 2", redirection)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert call("nonsense", redirection).returncode == 2


def test_without_standard_input_there_is_no_prompt() -> None:
    done = call(f"run {PLAN}", "<&-")
    assert done.returncode == 2 and "error[P603]: there is no prompt" in done.stderr
    assert call(f"run {PLAN}", "<&- >&- 2>&-").returncode == 2


def test_arguments_that_are_no_text_are_told_of() -> None:
    done = call(f"run {PLAN} --prompt $'a\\xff'", "")
    assert done.returncode == 2 and "error[P607]: the prompt is not UTF-8" in done.stderr


def test_a_pipe_that_nobody_reads_is_no_finding() -> None:
    done = call(f"show {PLAN}", "| true; exit ${PIPESTATUS[0]}")
    assert done.returncode in (0, 141) and "error" not in done.stderr


@pytest.mark.parametrize("more", [[], ["--prompt", "b"]], ids=" ".join)
def test_text_commands_no_terminal_and_is_as_it_was_made_elsewhere(
    plan: Path, more: list[str]
) -> None:
    command = [sys.executable, "-m", "pi2", "run", str(plan), "--prompt", "a", *more]
    command += ["--temperature", "2", "--seed", "3", "--max-tokens", "50", "--ignore-eos"]
    piped = subprocess.run(
        command, capture_output=True, timeout=PATIENCE_S, check=True
    ).stdout.decode()
    assert any(map(is_control, piped)), "another seed is needed"
    screen, terminal = pty.openpty()
    tty.setraw(terminal)  # line ends stay as they are
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        shown = b""
        try:
            while part := os.read(screen, 4096):
                shown += part
        except OSError:  # the other end was closed
            pass
    os.close(screen)
    assert process.returncode == 0
    assert shown.decode() == show_controls(piped)
    assert not any(map(is_control, shown.decode()))
