"""`pi2 validate` over files with one planted mistake each: the right code, line and column.

places.txt beside the documents is the specification and is written by hand: a file, severity, code
and place of its mistake.  The ``.expected`` files are the full output, written by ``python -m
tests.helpers.broken_plans`` and read before they are committed.
"""

import json
import re
from typing import Any

import pytest

from pi2.fitting.rules import list_rules
from tests.helpers.broken_plans import BROKEN, find_expected, list_names, validate

PLANTED = {line.split()[0]: line for line in (BROKEN / "places.txt").read_text().splitlines()}


def test_every_file_has_its_mistake_listed() -> None:
    assert list_names() == list(PLANTED)
    assert len(PLANTED) >= 40


def test_every_rule_has_a_file() -> None:
    assert {rule.code for rule in list_rules()} <= {line.split()[2] for line in PLANTED.values()}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[dict[str, Any], str]]:
    """The finding of each file, as JSON and as text; one process reads all."""
    findings = json.loads(validate(*list_names(), "--format", "json")[1])
    texts = re.split(r"\n(?=(?:error|warning)\[)", validate(*list_names())[1])
    return dict(zip(list_names(), zip(findings, texts, strict=True), strict=True))


@pytest.mark.parametrize("name", list_names())
def test_the_mistake_is_found_at_its_place(
    name: str, found: dict[str, tuple[dict[str, Any], str]]
) -> None:
    finding, text = found[name]
    span, severity = finding["span"], finding["severity"]
    place = f"{span['line']}:{span['column']}"
    if span["file"] != name:
        place = f"{span['file']}:{place}"
    assert f"{name} {severity} {finding['code']} {place}" == PLANTED[name]
    assert text == find_expected(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list_names()[::20])
def test_a_file_by_itself_has_the_same_finding(name: str) -> None:
    code, stdout, _ = validate(name)
    assert stdout == find_expected(name).read_text(encoding="utf-8")
    assert code == (" error " in PLANTED[name])


def test_all_files_at_once() -> None:
    code, stdout, stderr = validate(*list_names(), "--format", "concise")
    assert code == 1
    assert len(stdout.splitlines()) == len(PLANTED)
    errors = sum(" error " in line for line in PLANTED.values())
    assert f"{len(PLANTED)} files, {errors} errors, {len(PLANTED) - errors} warnings" in stderr


def test_the_parts_themselves_are_sound() -> None:
    parts = sorted(str(p.relative_to(BROKEN)) for p in (BROKEN / "parts").glob("*.toml"))
    assert validate(*[part for part in parts if "dented" not in part])[0] == 0
