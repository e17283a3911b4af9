"""Reports for continuous integration: GitHub, GitLab, SARIF and JUnit."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from hypothesis import example, given
from hypothesis import strategies as st

from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.baseline import read_comments, sift
from pi2.diagnostics.reports import compute_fingerprints
from pi2.diagnostics.texts import list_formats
from pi2.diagnostics.texts import render as render_as
from tests.helpers.broken_plans import validate
from tests.helpers.reports import FILES, FINDINGS, GOLDEN, SOURCES, write_report

TEXT = "a = 1\nb = 2\n"


def make_finding(**changes: Any) -> Diagnostic:
    item = Diagnostic(code="P100", message="m", span=Span("f", 2, 1, 2, 2))
    return dataclasses.replace(item, **changes)


def render(name: str, *items: Diagnostic) -> str:
    return render_as(name, items, sources={"f": TEXT})


def hide_version(report: str) -> str:
    """The report without the version of pi2, which SARIF states."""
    return re.sub(r'("name": "pi2",\s+"version": )"[^"]+"', r"\1...", report)


@pytest.mark.parametrize("name", FILES)
def test_report_is_as_expected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the top of a repository, by which files are named."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    expected = (GOLDEN / FILES[name]).read_text(encoding="utf-8")
    assert hide_version(write_report(name)) == hide_version(expected)


def test_all_formats_that_the_plan_language_promises() -> None:
    wanted = {"full", "concise", "json", "github", "gitlab", "sarif", "junit"}
    assert set(list_formats()) == wanted


# GitHub
def test_github_escapes_what_would_end_a_property_or_the_command() -> None:
    line = render("github", make_finding(message="50%\r\n: ,", span=Span("a:b,%\n", 1, 1, 1, 2)))
    assert line == (
        "::error title=pi2 (P100),file=a%3Ab%2C%25%0A,line=1,col=1,endLine=1,endColumn=2"
        "::50%25%0D%0A: ,\n"
    )


def test_github_knows_no_columns_of_several_lines() -> None:
    line = render("github", make_finding(span=Span("f", 1, 3, 2, 4)))
    assert line == "::error title=pi2 (P100),file=f,line=1,endLine=2::m\n"


def test_github_has_its_own_word_for_notes() -> None:
    heads = [
        render("github", make_finding(severity=severity)).split(" ")[0]
        for severity in ("error", "warning", "note")
    ]
    assert heads == ["::error", "::warning", "::notice"]


@given(st.text(), st.text(min_size=1))
def test_github_takes_one_line_for_any_finding(message: str, file: str) -> None:
    text = render("github", make_finding(message=message, span=Span(file, 1, 1, 1, 2)))
    assert text.splitlines() == [text.removesuffix("\n")]


@pytest.mark.parametrize("path", ["layers.split", None], ids=["by key path", "by line"])
def test_a_finding_keeps_its_fingerprint_when_lines_are_added_above(path: str | None) -> None:
    before = make_finding(path=path)
    after = make_finding(path=path, span=Span("f", 4, 1, 4, 2))
    assert compute_fingerprints([before], {"f": TEXT}) == compute_fingerprints(
        [after], {"f": "# new\n\n" + TEXT}
    )


def test_a_finding_keeps_its_fingerprint_when_the_wording_changes() -> None:
    before, after = make_finding(path="a", message="8 MiB"), make_finding(path="a", message="9 MiB")
    assert compute_fingerprints([before]) == compute_fingerprints([after])


def test_different_findings_have_different_fingerprints() -> None:
    items = [
        make_finding(), make_finding(), make_finding(code="P101"), make_finding(path="a"),
        make_finding(path="b"), make_finding(span=Span("f", 1, 1, 1, 2)),
        make_finding(span=Span("g", 1, 1, 1, 2)), make_finding(span=None),
        make_finding(span=None, message="other"),
    ]  # fmt: skip
    prints = compute_fingerprints(items, {"f": TEXT})
    assert len(set(prints)) == len(items)
    assert all(re.fullmatch("[0-9a-f]{64}", item) for item in prints)


@pytest.mark.parametrize("name", ["github", "gitlab", "sarif"])
def test_the_working_directory_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "plans/deep").mkdir(parents=True)
    (tmp_path / "plans/pi2.lock").touch()  # a project within the repository
    reports = set()
    for folder, file in ((".", "plans/a"), ("plans", "a"), ("plans/deep", "../a")):
        monkeypatch.chdir(tmp_path / folder)
        item = make_finding(span=Span(file, 2, 1, 2, 2))
        reports.add(render_as(name, [item], sources={file: TEXT}))
    (report,) = reports
    assert '"plans/a"' in report or "file=plans/a," in report


def test_outside_of_a_repository_the_file_s_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.diagnostics.reports.MARKS", ())
    prints = {
        compute_fingerprints([make_finding(span=Span(file, 2, 1, 2, 2))])[0]
        for file in ("a", "deep/../a", str(tmp_path / "a"))
    }
    assert len(prints) == 1


SARIF_PART = json.loads((GOLDEN / "sarif-part.schema.json").read_text(encoding="utf-8"))
"""The parts of the standard's schema that pi2 uses, and nothing else allowed."""


@pytest.mark.parametrize("findings", [FINDINGS, ()], ids=["findings", "none"])
def test_sarif_has_the_structure_of_the_standard(findings: tuple[Diagnostic, ...]) -> None:
    log = json.loads(render_as("sarif", findings, sources=SOURCES))
    jsonschema.validate(log, SARIF_PART)
    (run,) = log["runs"]
    assert len(run["results"]) == len(findings)
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_sarif_says_of_a_rule_what_its_page_says() -> None:
    (run,) = json.loads(write_report("sarif"))["runs"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert sorted(rules) == ["P001", "P010", "P101", "P210", "P900"]
    assert rules["P210"]["shortDescription"] == {"text": "Split shares do not add up to 1."}
    assert "**Fix:** change one." in rules["P210"]["help"]["markdown"]
    assert "Fix: change one." in rules["P210"]["help"]["text"]


# JUnit
def count_cases(root: ElementTree.Element) -> tuple[int, int]:
    cases = root.findall("testsuite/testcase")
    return len(cases), sum(case.find("failure") is not None for case in cases)


@pytest.mark.parametrize("findings", [FINDINGS, ()], ids=["findings", "none"])
def test_junit_is_accepted_by_its_schema(findings: tuple[Diagnostic, ...]) -> None:
    schema = xmlschema.XMLSchema(GOLDEN / "junit.xsd")
    report = render_as("junit", findings, sources=SOURCES)
    schema.validate(report)
    with pytest.raises(xmlschema.XMLSchemaValidationError):
        schema.validate(report.replace("classname", "class"))


def test_junit_has_one_failure_of_a_file_with_several_errors() -> None:
    text = render("junit", make_finding(message="first"), make_finding(message="second"))
    (failure,) = ElementTree.fromstring(text).iter("failure")
    assert failure.get("message") == "P100: first (and 1 more)"
    assert "first" in (failure.text or "")
    assert "second" in (failure.text or "")


def test_junit_without_findings_passes() -> None:
    root = ElementTree.fromstring(render("junit"))
    assert count_cases(root) == (1, 0)
    assert root.get("failures") == "0"


@given(
    st.text(st.characters(exclude_categories=())),
    st.text(st.characters(exclude_categories=()), min_size=1),
)
def test_junit_is_well_formed_for_any_characters(message: str, file: str) -> None:
    item = make_finding(message=message, help=message, span=Span(file, 2, 1, 2, 2))
    text = render_as("junit", [item], sources={file: f"{message}\n{message}"})
    text.encode("ascii")
    (failure,) = ElementTree.fromstring(text).iter("failure")
    assert failure.get("type") == "P100"


@given(st.text(st.characters(exclude_categories=())))
@example("\ud800")
@pytest.mark.parametrize("name", ["gitlab", "sarif"])
def test_json_reports_are_ascii_for_any_characters(name: str, text: str) -> None:
    report = render_as(name, [make_finding(message=text, path=text)], sources={"f": text})
    json.loads(report.encode("ascii"))


# The command
@pytest.mark.parametrize("name", FILES)
def test_validate_writes_the_report_alone_to_stdout(name: str) -> None:
    files = ("wide-before-place.plan.toml", "chunk-above-context.plan.toml")
    code, stdout, stderr = validate(*files, "--format", name)
    assert code == 1
    assert stderr == "2 files, 1 error, 1 warning\n"
    if name == "junit":
        # A plan's device and model are cases of their own.
        assert count_cases(ElementTree.fromstring(stdout)) == (4, 1)
    elif name == "github":
        assert [line.split(" ")[0] for line in stdout.splitlines()] == ["::error", "::warning"]
    elif name == "gitlab":
        assert [item["check_name"] for item in json.loads(stdout)] == ["P106", "P235"]
    else:
        rules = json.loads(stdout)["runs"][0]["tool"]["driver"]["rules"]
        assert all("help" in rule for rule in rules if rule["id"].startswith("P2"))


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
