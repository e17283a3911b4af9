"""Findings that a project leaves out, inherits, or knows already."""

import json
from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.baseline import read_comments, sift
from pi2.diagnostics.texts import list_formats
from pi2.fitting.check import check_file
from pi2.plan.reading.references import find_shipped_folder
from pi2.plan.toml.source import display_path

Capture = pytest.CaptureFixture[str]
CHUNK = 'schema_version = 3\nextends = ["demo"]\n[kv]\ncontext = 64\n[prefill]\nchunk = 128\n'
"""A plan with one warning: P235 in its last line."""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plans/small.plan.toml"
    path.parent.mkdir()
    path.write_text(CHUNK)
    return path


def validate(*arguments: str) -> int:
    return run(["validate", *arguments])


def list_found(capsys: Capture, *arguments: str) -> list[tuple[str, str, int]]:
    capsys.readouterr()
    validate("plans", "--format", "json", *arguments)
    found = json.loads(capsys.readouterr().out)
    return [(item["code"], item["severity"], item["span"]["line"]) for item in found]


def test_warnings_count_if_somebody_says_so(plan: Path, capsys: Capture) -> None:
    assert validate("plans") == 0
    assert validate("plans", "--strict") == 1
    assert list_found(capsys, "--strict") == [("P235", "error", 6)]
    (plan.parents[1] / "pyproject.toml").write_text("[tool.pi2]\nstrict = true\n")
    assert validate("plans") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("chunk = 128", "chunk = 128  # pi2: ignore P235 (a short test)"),
        ("chunk = 128", "# pi2: ignore P403, P235 (a short test)\n\nchunk = 128"),
        ("chunk = 128", "#pi2:ignore P235 ( why )\n# remark\nchunk = 128"),
    ],
    ids=["its line", "the line before", "with remarks between"],
)
def test_a_comment_leaves_a_finding_out(plan: Path, old: str, new: str, capsys: Capture) -> None:
    plan.write_text(CHUNK.replace(old, new))
    assert "P235" not in [code for code, _, _ in list_found(capsys)]
    assert validate("plans", "--strict") == ("P403" in new)  # which is not needed
    assert "1 ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("# pi2: ignore P235", "why is P235 ignored?"),
        ("# pi2: ignore", "cannot be read"),
        ("# pi2: ignore everything (why not)", "cannot be read"),
        ("# pi2: ignore P403 (a claim)", "P403 is ignored here, but not found"),
    ],
)
def test_an_ignore_has_a_reason_and_is_needed(
    plan: Path, comment: str, message: str, capsys: Capture
) -> None:
    plan.write_text(CHUNK.replace("chunk = 128", f"chunk = 128 {comment}"))
    assert ("P029", "warning", 6) in list_found(capsys)
    validate("plans")
    assert message in capsys.readouterr().out


def test_texts_are_no_comments() -> None:
    text = 'a = "# pi2: ignore P235 (x)"\nb = """\n# pi2: ignore P235 (x)\n"""\n'
    assert read_comments("x", text) == ([], [])


def test_comments_at_the_beginning_are_about_findings_without_a_line() -> None:
    text = "# pi2: ignore P411 (no name)\nid = 1\n"
    item = Diagnostic(code="P411", message="x", span=Span.of_file("x"))
    assert sift([item], {"x": text}, ["x"]).diagnostics == ()
    later = "id = 1\n# pi2: ignore P411 (no name)\nb = 2\n"
    assert item in sift([item], {"x": later}, ["x"]).diagnostics


@pytest.mark.parametrize(
    "settings",
    [
        'ignore = ["P235"]',
        'ignore = { P235 = "tests are short" }',
        'per-file-ignores = { "plans/**" = ["P235"] }',
        'per-file-ignores = { "small.plan.toml" = { P235 = "tests" } }',
    ],
)
def test_a_project_leaves_codes_out(plan: Path, settings: str, capsys: Capture) -> None:
    (plan.parents[1] / "pyproject.toml").write_text(f"[tool.pi2]\n{settings}\n")
    assert list_found(capsys, "--strict") == []


def test_a_projects_ignore_that_nothing_needs_is_told_if_all_its_files_were_checked(
    plan: Path, capsys: Capture
) -> None:
    (plan.parent / "other.plan.toml").write_text(CHUNK.replace("128", "64"))
    settings = '[tool.pi2.per-file-ignores]\n"plans/*" = ["P237"]\n"other*" = ["P235"]\n'
    (plan.parents[1] / "pyproject.toml").write_text(settings)
    assert ("P029", "warning", 2) in (found := list_found(capsys))
    assert ("P029", "warning", 3) in found
    capsys.readouterr()
    validate(str(plan))
    assert "P029" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    ["ignores = []", 'ignore = "P235"', 'ignore = ["chunks"]', "strict = 1", "baseline = 2"],
)
def test_wrong_settings_of_a_project_are_told(plan: Path, settings: str, capsys: Capture) -> None:
    (plan.parents[1] / "pyproject.toml").write_text(f"[tool.pi2]\n{settings}\n")
    assert validate("plans") == 1
    assert "error[P030]" in (said := capsys.readouterr().err) and "pyproject.toml:2" in said


def test_baseline_leaves_out_what_was_there(plan: Path, capsys: Capture) -> None:
    assert validate("plans", "--write-baseline") == 2
    assert validate("plans", "--baseline", "known.json", "--write-baseline") == 0
    assert list_found(capsys, "--baseline", "known.json", "--strict") == []
    plan.write_text("# a line more\n" + CHUNK)  # the same finding, further down
    assert list_found(capsys, "--baseline", "known.json", "--strict") == []
    plan.write_text(CHUNK.replace("context = 64", "context = 4096"))
    found = list_found(capsys, "--baseline", "known.json")
    assert [code for code, _, _ in found] == ["P202", "P231"]
    validate("plans", "--baseline", "known.json")
    assert "1 of the baseline mended" in capsys.readouterr().err


def test_a_baseline_that_cannot_be_read_is_told(plan: Path, capsys: Capture) -> None:
    assert validate("plans", "--baseline", "none.json") == 2
    Path("bad.json").write_text('{"version": 1}')
    assert validate("plans", "--baseline", "bad.json") == 2
    assert capsys.readouterr().err.count("error[P031]") == 2


@pytest.mark.parametrize("form", list_formats())
def test_every_format_follows(plan: Path, form: str, capsys: Capture) -> None:
    validate("plans", "--format", form, "--strict")
    assert "P235" in capsys.readouterr().out
    plan.write_text(CHUNK.replace("chunk = 128", "chunk = 128  # pi2: ignore P235 (short)"))
    validate("plans", "--format", form, "--strict")
    assert "P235" not in capsys.readouterr().out


def test_junit_has_no_files_of_installation(plan: Path, capsys: Capture) -> None:
    validate("plans", "--format", "junit")
    report = capsys.readouterr().out
    assert report.count("<testcase") == 1 and "small.plan.toml" in report


def test_the_page_that_is_advised_is_of_the_worst_finding(plan: Path, capsys: Capture) -> None:
    plan.write_text(CHUNK + "[layers]\nhto = 0.1\n")
    assert validate("plans") == 1
    assert "`pi2 explain P101`" in capsys.readouterr().err


def find(path: Path, text: str) -> Diagnostic:
    """The only finding about a document of the user's."""
    path.write_text(f"schema_version = 3\n{text}")
    (item,) = check_file(path).diagnostics
    return item


def show(item: Diagnostic) -> tuple[str, str, str | None]:
    assert item.span is not None
    return item.code, f"{item.span.line}:{item.span.column}", item.help


def test_a_value_of_a_shipped_plan_is_found_where_it_is_inherited(tmp_path: Path) -> None:
    path = tmp_path / "my.plan.toml"
    item = find(path, 'extends = ["demo"]\nkv.context = 1024\nlayers.hot = 0.25\n')
    assert item.span is not None and item.span.file == str(path)
    wanted = f'in {path}, write memory.segments.hot = "1 MiB", or lower layers.hot'
    assert show(item) == ("P202", "2:12", wanted)
    place = display_path(find_shipped_folder() / "demo.plan.toml")
    assert any(note.startswith(f"{place}:") for note in item.notes)
    assert any(note.endswith('hot = "512 KiB"') for note in item.notes)
    # What it says to write is enough.
    path.write_text(path.read_text() + 'memory.segments.hot = "1 MiB"\nmemory.budget = "129 MiB"\n')
    assert check_file(path).is_sound


def test_a_value_of_a_shipped_device_is_found_in_the_device_that_extends_it(tmp_path: Path) -> None:
    path = tmp_path / "c.device.toml"
    item = find(path, 'id = "c"\nextends = ["oneplus-12"]\nmemory.capacity = "1 GiB"\n')
    assert show(item) == ("P250", "3:12", f"write memory.usable in {path}, and it counts instead")


def test_a_name_in_a_shipped_plan_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "my.plan.toml"
    text = 'extends = ["oneplus-12/bamboo-7b-half"]\ndevice = "x86-laptop"\nthreads.compute = 4\n'
    path.write_text(f"schema_version = 3\n{text}")
    found = [item for item in check_file(path).diagnostics if item.code == "P211"]
    assert show(found[0])[1] == "2:12"
    assert f'write remove = ["layers.split.npu"] in {path} to leave it out' in str(found[0].help)


def test_the_way_ends_at_the_last_file_of_one_s_own(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.plan.toml", tmp_path / "my.plan.toml"
    extends = 'extends = ["base.plan.toml"]\n'
    base.write_text('schema_version = 3\n\nextends = ["demo"]\n')
    item = find(mine, f"{extends}layers.hot = 0.25\n")
    assert item.span is not None and item.span.place == f"{base}:3:12"
    assert f'{mine}:2:12: extends "base.plan.toml"' in item.notes
    base.write_text('schema_version = 3\nextends = ["demo"]\nmemory.segments.hot = "256 KiB"\n')
    item = find(mine, extends)
    assert item.span is not None and item.span.place == f"{base}:3:23"
