"""`pi2 completion`: what a shell is taught, and what it then answers."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete

from pi2.authoring.explanation import describe_field, parse_path
from pi2.cli.main import group, list_commands, run
from pi2.cli.options import read_table, suggest_settings
from pi2.plan.documents.plan import Plan

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_name_pi2(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert f"_PI2_COMPLETE={shell}_complete" in out and "%(" not in out


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of" in capsys.readouterr().err


def test_bash_completes_commands(tmp_path: Path) -> None:
    """As it does once it was taught."""
    program = tmp_path / "pi2"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pi2 "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(pi2 completion bash)"
        COMP_WORDS=(pi2 profile p); COMP_CWORD=2
        _pi2_completion pi2
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--noprofile", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == {"publish"}


def offer(*words: str) -> list[str]:
    """What any shell is told that may stand for the last word after ``pi2``."""
    shell = BashComplete(group, {}, "pi2", "_PI2_COMPLETE")
    found = shell.get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found if item.type == "plain"]


def test_commands_are_offered() -> None:
    assert set(offer("")) == set(list_commands())


def test_names_of_documents_are_offered() -> None:
    assert offer("plan", "--device", "oneplus-1") == ["oneplus-12"]
    assert offer("new", "plan", "--model", "bamb") == ["bamboo-7b"]
    assert "raspberry-pi-5" in offer("new", "device", "--like", "ra")
    assert offer("new", "device", "--like", "xiaomi") == ["xiaomi-14"]


def test_codes_and_keys_are_offered() -> None:
    assert set(offer("explain", "P20")) == {"P201", "P202", "P203", "P204", "P205"}
    assert offer("explain", "p201") == ["P201"]
    assert offer("explain", "kv.con") == ["kv.context"]
    assert "units.*.kind" in offer("explain", "units.")


def test_settings_are_offered() -> None:
    plan = str(ROOT / "plans/demo.plan.toml")
    assert offer("run", plan, "--set", "kv.con") == ["kv.context="]
    offered = offer("run", plan, "--set", "decode.predictor")
    assert {"decode.predictor=gate", "decode.predictor=low-rank"} <= set(offered)
    assert "cache.fill=true" in offer("simulate", plan, "--set", "cache.f")
    assert offer("run", plan, "--set", "memory.segments") != []


def test_every_offered_setting_is_a_key_of_a_plan() -> None:
    context = click.Context(click.Command("run"))
    for item in suggest_settings(context, click.Option(["--set"]), ""):
        key = item.value.partition("=")[0]
        assert describe_field(Plan, parse_path(key)) is not None, key


def test_options_and_choices_are_offered() -> None:
    assert "--format" in offer("validate", "--for")
    assert offer("validate", "--format", "s") == ["sarif"]


def test_every_option_has_a_help_and_every_help_an_option() -> None:
    waiting = [group.get_command(click.Context(group), name) for name in list_commands()]
    kinds: dict[str, Any] = {}
    while waiting:
        command = waiting.pop()
        assert command is not None and command.callback is not None
        waiting += command.commands.values() if isinstance(command, click.Group) else []
        options = [item for item in command.params if isinstance(item, click.Option)]
        assert [item.name for item in options if not (item.help or item.hidden)] == []
        kinds |= vars(sys.modules[command.callback.__module__])
    for name, texts in read_table().items():
        assert texts.keys() <= {item.name for item in fields(kinds[name])}, name
