"""Where reports of `pi2 validate` go, and what it finds in stores."""

import os
from pathlib import Path

import pytest

from pi2.cli.main import run
from tests.helpers.programs import start_pi2

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
