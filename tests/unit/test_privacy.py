"""What counts as private in a text, and what is left of it."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pi2.plan.documents.private import find_matches, find_private, strip_private
from tests.helpers.tables import in_table

ROOT = Path(__file__).parents[2]


@in_table
def test_what_is_private(text: str, kind: str, left: str) -> None:
    stripped, found = strip_private(text)
    assert [item.kind for item in found] == [kind]
    assert stripped == left
    assert find_private(stripped) == ()


@in_table
def test_what_is_not(text: str) -> None:
    assert find_private(text) == ()


def test_no_shipped_document_has_anything_private() -> None:
    for path in (ROOT / "plans").rglob("*.toml"):
        assert find_private(path.read_text("utf-8")) == (), path


@given(st.text(alphabet='aA1@./:-_ =\\"~\n', max_size=200))
def test_nothing_is_left_and_nothing_else_is_taken(text: str) -> None:
    stripped, found = strip_private(text)
    for item in found:
        assert text[item.start : item.end] == item.text
    if not found:
        assert stripped == text


@given(st.text(alphabet='aAfZ19@./:-_ =\\"~', max_size=60))
def test_what_needs_no_further_look_has_nothing(text: str) -> None:
    assert bool(find_private(text)) == bool(list(find_matches(text)))


def test_long_texts_take_no_time() -> None:
    for piece in ("A", "1", "a@", "a.", "-", "/home/", "serial ", "A1", "://", "aa:"):
        find_private(piece * (200_000 // len(piece)))
