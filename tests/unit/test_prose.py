"""Patterns of prose become fewer in documents, help, messages, schemas and docstrings."""

import pytest

from tools import check_prose

PATTERNS = check_prose.read_patterns()


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
@pytest.mark.parametrize("kind", check_prose.KINDS)
def test_a_pattern_is_no_more_frequent_than_its_limit(
    pattern: check_prose.Pattern, kind: str
) -> None:
    number = check_prose.count(pattern, kind)
    assert number <= pattern.limits[kind], (
        f"write {pattern.instead!r}; `python tools/check_prose.py --show {pattern.name}"
        f" --kind {kind}` prints the places"
    )


def test_every_pattern_finds_its_own_example() -> None:
    for pattern in PATTERNS:
        example = pattern.example if pattern.regex else "word " * (pattern.words + 1)
        assert pattern.find(example), pattern.name


def test_contributing_shows_every_pattern() -> None:
    text = (check_prose.ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert [item.name for item in PATTERNS if f"| `{item.name}` |" not in text] == []


def test_code_and_links_are_no_prose() -> None:
    text = "A [link](what-is.md) `what is`.\n\n```sh\nwhat is\n```\n\n- what\n  is\n"
    assert check_prose.clean_markdown(text) == "A [link] code.\n- what is"
