"""The command line's frame and the commands about plans."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from pi2.cli import main
from pi2.cli.main import run
from pi2.logging import wants_colour
from tests.helpers.programs import Ask, start_pi2, start_python

Patch = pytest.MonkeyPatch


ROOT = Path(__file__).parents[2]


DEMO = "plans/demo.plan.toml"


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)


def start(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return start_pi2(*arguments, cwd=ROOT, **options)


@pytest.mark.parametrize("group", ["model", "new", "predictor", "profile", "sparsity", "store"])
def test_help_says_of_commands_within_a_command_what_they_do_in_whole_sentences(
    group: str, ask: Ask
) -> None:
    commands = ask([group, "--help"]).out.partition("\nCommands:\n")[2]
    assert commands and "..." not in commands


def test_help_has_every_command_in_a_section_and_on_one_line(ask: Ask) -> None:
    text = ask(["--help"]).out
    for group, found in main.COMMANDS.items():
        section = text.partition(f"\n{group}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(found)


@pytest.mark.parametrize(
    ("arguments", "there", "absent"),
    [
        (["--help"], "pi2.cli.main", {"pi2.cli.validate", "pi2.cli.documents", "pydantic"}),
        # Sound files are not searched for places.
        (["validate", DEMO], "pi2.fitting.check", {"tree_sitter", "pi2.plan.toml.spans"}),
    ],
)
def test_commands_import_what_they_need(arguments: list[str], there: str, absent: set[str]) -> None:
    script = f"import sys; from pi2.cli.main import run; run({arguments}); print(*sys.modules)"
    modules = set(start_python("-c", script, cwd=ROOT, check=True).stdout.splitlines()[-1].split())
    assert there in modules and absent.isdisjoint(modules)


def test_bug_prints_one_line_and_leaves_a_log(tmp_path: Path, monkeypatch: Patch, ask: Ask) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    @click.command("broken")
    @click.argument("secret")
    def broken(secret: str) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: broken)
    error = ask(["validate", "a prompt"], 3).err
    assert "Traceback" not in error and "ZeroDivisionError: by zero" in error
    (log,) = (tmp_path / "pi2").iterdir()
    assert str(log) in error
    text = log.read_text()
    assert "Traceback" in text and "pydantic " in text
    assert "command 'validate'" in text and "a prompt" not in text


def test_a_log_goes_elsewhere_if_it_must(tmp_path: Path, monkeypatch: Patch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    place = main.write_log("text")
    assert place is not None and place.read_text() == "text"
    place.unlink()


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 2), (BrokenPipeError(), 141)]
)
def test_interruptions_have_exit_codes(error: BaseException, code: int, monkeypatch: Patch) -> None:
    @click.command("broken")
    def broken() -> None:
        raise error

    monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: broken)
    assert run(["validate"]) == code


def test_ctrl_c_ends_with_130() -> None:
    script = f"""
import os, signal, sys, time
import pi2.fitting.check
from pi2.cli.main import main

def interrupt(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

pi2.fitting.check.check_file = interrupt
sys.argv[1:] = ["validate", {DEMO!r}]
main()
"""
    done = start_python("-c", script, cwd=ROOT)
    assert done.returncode == 130
    assert done.stderr == "\ninterrupted\n"  # after the terminal's ^C


def test_a_terminal_without_utf_8_does_no_harm() -> None:
    done = start(
        "validate",
        "tests/plans/broken/wide-characters.plan.toml",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1 and "\\u540d" in done.stdout


def test_colours_are_for_terminals(monkeypatch: Patch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colour(Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())  # type: ignore[arg-type]
    assert not wants_colour(sys.__stdin__)  # type: ignore[arg-type]


BROKEN = Path(__file__).parents[1] / "plans/broken/shares-above-one.plan.toml"


def validate(*arguments: str) -> int:
    return run(["validate", str(BROKEN), "--format", "json", *arguments])


def test_a_link_stays_a_link_to_a_report_without_colours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.cli.main.wants_colour", lambda stream: True)
    target, link = tmp_path / "report.txt", tmp_path / "link.txt"
    link.symlink_to(target)
    assert run(["validate", str(BROKEN), "-o", str(link)]) == 1
    assert link.is_symlink() and "P210" in target.read_text("utf-8")
    assert "\x1b" not in target.read_text("utf-8")


def test_a_pipe_gets_the_report() -> None:
    done = start_pi2("validate", str(BROKEN), "-o", "/dev/stdout")
    assert done.returncode == 1 and done.stdout.startswith("error[P210]")
    assert os.path.lexists("/dev/stdout")
