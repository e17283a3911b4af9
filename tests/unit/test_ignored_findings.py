"""Findings that a project leaves out, inherits, or knows already."""

from pathlib import Path

import pytest

from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.baseline import read_comments, sift

CHUNK = 'schema_version = 3\nextends = ["demo"]\n[kv]\ncontext = 64\n[prefill]\nchunk = 128\n'
"""A plan with one warning: P235 in its last line."""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plans/small.plan.toml"
    path.parent.mkdir()
    path.write_text(CHUNK)
    return path


def test_texts_are_no_comments() -> None:
    text = 'a = "# pi2: ignore P235 (x)"\nb = """\n# pi2: ignore P235 (x)\n"""\n'
    assert read_comments("x", text) == ([], [])


def test_comments_at_the_beginning_are_about_findings_without_a_line() -> None:
    text = "# pi2: ignore P411 (no name)\nid = 1\n"
    item = Diagnostic(code="P411", message="x", span=Span.of_file("x"))
    assert sift([item], {"x": text}, ["x"]).diagnostics == ()
    later = "id = 1\n# pi2: ignore P411 (no name)\nb = 2\n"
    assert item in sift([item], {"x": later}, ["x"]).diagnostics
