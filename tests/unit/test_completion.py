"""`pi2 completion`: what a shell is taught, and what it then answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pi2.authoring.explanation import describe_field, parse_path
from pi2.cli.commands import list_commands
from pi2.cli.main import run
from pi2.cli.options import suggest_settings
from pi2.plan.documents.plan import Plan


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_name_pi2(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert f"_PI2_COMPLETE={shell}_complete" in out
    assert "%(" not in out


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of" in capsys.readouterr().err


def ask(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers after ``words`` once it was taught."""
    program = tmp_path / "pi2"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pi2 "$@"\n')
    program.chmod(0o755)
    listed = " ".join(f"'{word}'" for word in words)
    script = f"""
        eval "$(pi2 completion bash)"
        COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}
        _pi2_completion pi2
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--noprofile", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_bash_completes_commands(tmp_path: Path) -> None:
    assert set(ask(tmp_path, "pi2", "")) == set(list_commands())
    assert set(ask(tmp_path, "pi2", "profile", "s")) == {"search", "show"}


def test_bash_completes_names_of_documents(tmp_path: Path) -> None:
    assert ask(tmp_path, "pi2", "plan", "--device", "oneplus-1") == ["oneplus-12"]
    assert ask(tmp_path, "pi2", "new", "plan", "--model", "bamb") == ["bamboo-7b"]
    assert "raspberry-pi-5" in ask(tmp_path, "pi2", "profile", "show", "ra")
    assert ask(tmp_path, "pi2", "new", "device", "--like", "xiaomi") == ["xiaomi-14"]


def test_bash_completes_codes_and_keys(tmp_path: Path) -> None:
    assert set(ask(tmp_path, "pi2", "explain", "P20")) == {"P201", "P202", "P203", "P204", "P205"}
    assert ask(tmp_path, "pi2", "explain", "p201") == ["P201"]
    assert ask(tmp_path, "pi2", "explain", "kv.con") == ["kv.context"]
    assert "units.*.kind" in ask(tmp_path, "pi2", "explain", "units.")


def test_bash_completes_settings(tmp_path: Path) -> None:
    plan = "plans/demo.plan.toml"
    assert ask(tmp_path, "pi2", "run", plan, "--set", "kv.con") == ["kv.context="]
    offered = ask(tmp_path, "pi2", "run", plan, "--set", "decode.predictor")
    assert {"decode.predictor=gate", "decode.predictor=low-rank"} <= set(offered)
    assert "cache.fill=true" in ask(tmp_path, "pi2", "simulate", plan, "--set", "cache.f")
    assert ask(tmp_path, "pi2", "run", plan, "--set", "memory.segments") != []


def test_every_offered_setting_is_a_key_of_a_plan() -> None:
    context = click.Context(click.Command("run"))
    for item in suggest_settings(context, click.Option(["--set"]), ""):
        key = item.value.partition("=")[0]
        assert describe_field(Plan, parse_path(key)) is not None, key


def test_bash_completes_options_and_choices(tmp_path: Path) -> None:
    assert "--output-format" in ask(tmp_path, "pi2", "validate", "--out")
    assert ask(tmp_path, "pi2", "validate", "--output-format", "s") == ["sarif"]
