"""`pi2 validate --output-file`: the report goes to a file, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pi2.cli.main import run

BROKEN = Path(__file__).parents[1] / "plans/broken/shares-above-one.plan.toml"


def validate(*arguments: str) -> int:
    return run(["validate", str(BROKEN), "--output-format", "json", *arguments])


def test_the_report_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reports/pi2.json"
    path.parent.mkdir()
    path.write_text("an older report, which is longer than nothing")
    assert validate("--output-file", str(path)) == 1
    assert [item["code"] for item in json.loads(path.read_text("utf-8"))] == ["P210"]
    out, err = capsys.readouterr()
    assert (out, err) == ("", "1 file, 1 error\n")
    assert list(path.parent.iterdir()) == [path]


def test_it_is_without_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi2.cli.main.wants_colour", lambda stream: True)
    path = tmp_path / "report.txt"
    assert run(["validate", str(BROKEN), "-o", str(path)]) == 1
    assert "\x1b" not in path.read_text("utf-8")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    validate("-o", str(link))
    assert link.is_symlink()
    assert json.loads(target.read_text("utf-8"))


def test_a_pipe_gets_the_report() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pi2", "validate", str(BROKEN), "-o", "/dev/stdout"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("error[P210]")
    assert os.path.lexists("/dev/stdout")


def test_a_folder_without_documents_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep").mkdir()
    assert run(["validate", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "error[P002]: there is no document in this folder" in out
    assert "*.plan.toml, *.device.toml or *.model.toml" in out


def test_where_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert validate("-o", str(tmp_path / "file/report.json")) == 2
    assert "error[P003]" in capsys.readouterr().err
