"""Where reports of `pi2 validate` go, and what it finds in stores."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from pi2.cli.main import run
from tests.helpers.programs import Ask, start_pi2

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
PLAN = (ROOT / "plans/demo.plan.toml").read_text("utf-8")
STORE = ROOT / "plans/stores/pi2-demo"
TWICE_AS_WIDE = {'"512 B"': '"1 KiB"', '"512 KiB"': '"1 MiB"', 'cold = "1 MiB"': 'cold = "2 MiB"'}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORE, tmp_path / "store"))


def write_plan(folder: Path, changes: dict[str, str]) -> Path:
    """The demo plan with other texts, beside the store."""
    text = PLAN.replace("stores/pi2-demo", "store")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "my.plan.toml"
    path.write_text(text, "utf-8")
    return path


def check(path: Path, capsys: Capture) -> list[str]:
    """Codes, and lines, that `pi2 validate` reports; a run has to end with the same code."""
    run(["validate", str(path), "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    codes = [f"{item['code']} {item['path']}" for item in found]
    assert all(item["span"]["file"] for item in found)
    exit_code = run(["run", str(path), "--prompt", "x", "--max-tokens", "1"])
    told = re.findall(r"error\[(P\d+)\]", capsys.readouterr().err)
    assert told == [item["code"] for item in found]
    assert (exit_code == 0) == (not found)
    return codes


def test_a_store_that_fits_is_no_finding(tmp_path: Path, store: Path, capsys: Capture) -> None:
    assert check(write_plan(tmp_path, {}), capsys) == []


def test_a_store_of_another_stride_is_found_at_the_stride(
    tmp_path: Path, store: Path, capsys: Capture
) -> None:
    path = write_plan(tmp_path, TWICE_AS_WIDE)
    assert check(path, capsys) == ["P520 bundle.stride"]
    run(["validate", str(path), "--format", "concise"])
    before = path.read_text("utf-8").split('"1 KiB"')[0]
    line, column = before.count("\n") + 1, len(before.splitlines()[-1]) + 1
    out = capsys.readouterr().out
    assert f"my.plan.toml:{line}:{column}: " in out and 'set bundle.stride = "512 B"' in out


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("layers/ffn-003.arrow", None, "P506"), ("layers/ffn-003.arrow", "cut", "P506"),
        ("manifest.json", "{}", "P503"), ("manifest.json", None, "P502"),
    ],
)  # fmt: skip
def test_a_damaged_store_is_found(
    file: str, content: str | None, code: str, tmp_path: Path, store: Path, capsys: Capture
) -> None:
    (store / file).unlink()
    if content is not None:
        (store / file).write_text(content)
    assert check(write_plan(tmp_path, {}), capsys) == [f"{code} weights"]


def test_a_store_of_another_model_is_found(tmp_path: Path, store: Path, capsys: Capture) -> None:
    model = (ROOT / "plans/models/pi2-demo.model.toml").read_text("utf-8")
    model = model.replace('id = "pi2-demo"', 'id = "other"').replace(
        "context = 1024", "context = 2048"
    )
    (tmp_path / "other.model.toml").write_text(model, "utf-8")
    changes = {'model = "pi2-demo"': 'model = "other.model.toml"'}
    assert check(write_plan(tmp_path, changes), capsys) == ["P505 weights"]


def test_a_store_that_is_not_there_is_no_finding(tmp_path: Path, capsys: Capture) -> None:
    assert run(["validate", str(write_plan(tmp_path, {}))]) == 0


def test_a_plan_that_runs_dry_does_not_look_at_the_store(
    tmp_path: Path, store: Path, capsys: Capture
) -> None:
    (store / "manifest.json").unlink()
    changes = {'backends = { cpu = "cpu" }': 'backends = { cpu = "null" }'}
    assert run(["validate", str(write_plan(tmp_path, changes))]) == 0


BROKEN = Path(__file__).parents[1] / "plans/broken/shares-above-one.plan.toml"


def validate(*arguments: str) -> int:
    return run(["validate", str(BROKEN), "--format", "json", *arguments])


def test_the_report_is_in_the_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "reports/pi2.json"
    path.parent.mkdir()
    path.write_text("an older report, which is longer than nothing")
    assert validate("--output", str(path)) == 1
    assert [item["code"] for item in json.loads(path.read_text("utf-8"))] == ["P210"]
    out, err = capsys.readouterr()
    assert (out, err) == ("", "1 file, 1 error\n")
    assert list(path.parent.iterdir()) == [path]


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


def test_a_folder_without_documents_is_told_so(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "deep").mkdir()
    out = ask(["validate", str(tmp_path)], 2).out
    assert "error[P002]: there is no document in this folder" in out
    assert "*.plan.toml, *.device.toml or *.model.toml" in out


def test_where_it_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("no folder")
    assert validate("-o", str(tmp_path / "file/report.json")) == 2
    assert "error[P003]" in capsys.readouterr().err
