"""`pi2 migrate`: old documents become present ones, and nothing else in them changes."""

import re
import shutil
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from pi2.authoring.difference import migrate_text
from pi2.cli.main import run
from pi2.fitting.check import check_file
from pi2.plan.documents.common import SCHEMA_VERSION, find_type
from pi2.plan.reading.deprecations import RENAMES, STEPS, Rename, Step, find_old_keys
from pi2.plan.reading.references import DOCUMENTS
from pi2.plan.toml.source import Kind, detect_kind
from tests.helpers.tables import in_table

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / "tests/plans/versions"
FIXTURES = sorted(VERSIONS.glob("*/*.toml"))
BEGAN: dict[Kind, int] = {"family": 2}
"""The first version with documents of a kind, if it is not 1."""
SHIPPED = sorted((ROOT / "plans").rglob("*.toml"))


def read_kind(path: Path) -> Kind:
    kind = detect_kind(path.name)
    assert kind is not None
    return kind


def test_there_is_a_fixture_of_every_version_and_kind() -> None:
    for version in range(1, SCHEMA_VERSION + 1):
        kinds = {read_kind(path) for path in FIXTURES if path.parent.name == str(version)}
        assert kinds == {kind for kind in DOCUMENTS if BEGAN.get(kind, 1) <= version}, version
    assert set(STEPS) == set(range(1, SCHEMA_VERSION))


def test_every_rename_is_in_a_fixture() -> None:
    for rename in RENAMES:
        texts = (tomli.loads(p.read_text()) for p in FIXTURES if read_kind(p) == rename.kind)
        assert any(list(find_old_keys(values, rename)) for values in texts), rename.path
        document = DOCUMENTS[rename.kind]
        path = tuple(0 if part == "*" else part for part in rename.path)
        if rename.value is None:
            assert find_type(document, path) is None, "the old name is a key again"
        if rename.new is not None:
            assert find_type(document, (*path[:-1], rename.new)) is not None


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_old_documents_are_read_with_warnings(path: Path) -> None:
    report = check_file(path)
    assert report.document is not None
    own = [item for item in report.diagnostics if item.code == "P109"]
    assert {item.severity for item in own} <= {"warning"}


@pytest.mark.parametrize("version", [path.name for path in VERSIONS.iterdir() if path.is_dir()])
def test_old_documents_become_present_ones(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / version
    shutil.copytree(VERSIONS / version, folder)
    before = {path.name: check_file(path).document for path in folder.glob("*.toml")}
    assert run(["migrate", "--check", str(folder)]) == (int(version) < SCHEMA_VERSION)
    assert run(["migrate", str(folder)]) == 0
    assert run(["migrate", "--check", str(folder)]) == 0
    for path in folder.glob("*.toml"):
        report = check_file(path)
        assert [item for item in report.diagnostics if item.code == "P109"] == []
        assert report.document == before[path.name] and report.document is not None
        old = (VERSIONS / version / path.name).read_text()
        assert find_comments(path.read_text()) == find_comments(old)


def find_comments(text: str) -> list[str]:
    return re.findall(r"#.*", text)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_what_comes_with_pi2_is_current(path: Path) -> None:
    text = path.read_text("utf-8")
    assert migrate_text(read_kind(path), path.name, text).text == text


# A language that has gone on: version 3 calls `speed` `rate_mb_s`, and version 2 moved it.


def _move(document: MutableMapping[str, Any], kind: Kind) -> None:
    del kind
    if "speed" in document:
        document["disk"] = {"speed": document.pop("speed")}


def _rename(document: MutableMapping[str, Any], kind: Kind) -> None:
    del kind
    disk = document.get("disk", {})
    if "speed" in disk:
        disk["rate_mb_s"] = disk.pop("speed")


FUTURE: dict[int, Step] = {1: _move, 2: _rename}

OLD = """\
# What this is.
schema_version = 1   # the first

speed = 450
name = "x"  # kept

[other]  # too
a = [1,   2]  # as it was
"""


def test_steps_are_taken_one_after_the_other() -> None:
    result = migrate_text("device", "x", OLD, steps=FUTURE, renames=(), newest=3)
    values = tomli.loads(result.text)
    assert values["disk"] == {"rate_mb_s": 450} and values["schema_version"] == 3
    assert Counter(find_comments(OLD)) <= Counter(find_comments(result.text))
    assert "a = [1,   2]  # as it was" in result.text
    assert result.changes == ("schema_version 1 is 3 now",)
    again = migrate_text("device", "x", result.text, steps=FUTURE, renames=(), newest=3)
    assert (again.text, again.changes) == (result.text, ())


def test_a_document_without_a_version_gets_the_present_one() -> None:
    text = '#:schema x\n# Mine.\nname = "x"\n'
    result = migrate_text("plan", "x", text)
    assert result.text == '#:schema x\nschema_version = 3\n# Mine.\nname = "x"\n'
    assert migrate_text("plan", "x", "a = 1").text == "schema_version = 3\na = 1"
    assert migrate_text("plan", "x", "[a]\nb = 1").text == "schema_version = 3\n[a]\nb = 1"


def test_a_newer_document_is_left_alone() -> None:
    assert migrate_text("plan", "x", "schema_version = 99\n").changes == ()


RENAME = Rename(kind="plan", path=("a", "*", "old"), new="new", reason="it is")


@in_table
def test_keys_are_renamed_in_their_place(text: str, expected: str | None) -> None:
    head = f"schema_version = {SCHEMA_VERSION}\n"
    result = migrate_text("plan", "x", head + text, renames=(RENAME,))
    if expected is not None:
        assert result.text == head + expected
        assert migrate_text("plan", "x", result.text, renames=(RENAME,)).text == result.text
    else:
        assert result.findings  # bare keys are ASCII


GONE = Rename(kind="plan", path=("a", "gone"), reason="nobody used it")
NO_MMAP = Rename(kind="plan", path=("a", "engine"), value="mmap", reason="nobody used it")


@in_table
def test_keys_that_are_gone_are_deleted(text: str, expected: str) -> None:
    head = f"schema_version = {SCHEMA_VERSION}\n"
    result = migrate_text("plan", "x", head + text, renames=(GONE, NO_MMAP))
    assert tomli.loads(result.text) == tomli.loads(head + expected)
    assert find_comments(result.text) == find_comments(text)


@given(text=st.text(alphabet=' \n"=[]{}.,#\\abcold_1é\r', max_size=80), kind=st.sampled_from("pdm"))
def test_migration_is_total_and_ends(text: str, kind: str) -> None:
    which: Kind = {"p": "plan", "d": "device", "m": "model"}[kind]  # type: ignore[assignment]
    result = migrate_text(which, "x", text, renames=(RENAME, *RENAMES))
    if result.findings:
        assert result.text == text
        return
    again = migrate_text(which, "x", result.text, renames=(RENAME, *RENAMES))
    assert (again.text, again.changes) == (result.text, ())
    values = tomli.loads(result.text)
    if not result.changes:
        assert values == tomli.loads(text)
