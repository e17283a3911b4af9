"""Every code has a page: `pi2 explain`, docs/reference/findings, and the pages themselves."""

import os
import re
from pathlib import Path

import pytest

from pi2.cli import validate as explain
from pi2.cli.main import run
from pi2.fitting.check import load_pages
from tests.helpers.programs import Ask
from tools import write_rule_docs

ROOT = Path(__file__).parents[2]
PAGES = load_pages()


def find_used_codes() -> set[str]:
    found: set[str] = set()
    for folder in ("pi2", "pi2/backends", "tools"):  # a walk does not follow the link
        for parent, _, names in os.walk(ROOT / folder):
            for name in names:
                if name.endswith((".py", "stated.toml", "references.toml")):
                    text = (Path(parent) / name).read_text(encoding="utf-8")
                    found.update(re.findall(r"\bP\d{3}\b", text))
    return found


# Pages
def test_codes_in_the_source_are_those_that_have_pages() -> None:
    assert find_used_codes() == set(PAGES)


def test_pages_are_complete_sentences() -> None:
    for page in PAGES.values():
        for text in (page.what, page.why, page.example, page.fix):
            assert text.endswith("."), page.code
            assert "``" not in text, page.code
            assert text.count("`") % 2 == 0, page.code
        assert "\n" not in page.what


def test_lines_of_a_page_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    for code in PAGES:
        assert run(["explain", code]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= explain.COLUMNS


def test_explain_lists_all_codes(ask: Ask) -> None:
    lines = ask(["explain"]).out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(PAGES)
    assert "P210  Split shares do not add up to 1." in lines


@pytest.mark.parametrize(
    ("code", "near"),
    [
        *((code, 'P210 ("Split shares') for code in ("P2100", "210", "shares")),
        ("\x1bzzz", "`pi2 explain` lists all codes"),
    ],
)
def test_an_unknown_code_gets_near_ones(code: str, near: str, ask: Ask) -> None:
    error = ask(["explain", code], 2).err
    assert error.startswith("error[P018]: there is no code '") and near in error
    assert "\x1b" not in error


def test_terminal_gets_colours_and_same_words(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setattr(explain, "wants_colour", lambda _: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = ask(["explain", "P210"]).out
    assert "\x1b[" in output
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert "P210: Split shares do not add up to 1." in plain
    assert "Fix: change one of the shares; 0 leaves a unit out." in plain


# docs/reference/findings


def test_documents_are_as_the_rules_say() -> None:
    differing = write_rule_docs.find_differences(write_rule_docs.FOLDER)
    assert differing == [], "run `python tools/write_rule_docs.py`"


def test_the_index_links_to_the_section_of_every_code() -> None:
    index = write_rule_docs.write_index(PAGES)
    links = re.findall(r"^\| \[(P\d+)\]\((P\dxx\.md)#(p\d+)\)", index, re.MULTILINE)
    assert [code for code, _, _ in links] == sorted(PAGES)
    files = write_rule_docs.make_files()
    for code, name, anchor in links:
        assert anchor == code.lower()
        assert f"\n## {code}\n" in files[name]
