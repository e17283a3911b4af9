"""Where a cursor stands in a text that is still being written; ``|`` is the cursor."""

from hypothesis import given
from hypothesis import strategies as st
from pygls.workspace import PositionCodec

from pi2.lsp.checked import Lines
from pi2.lsp.completion import Cursor, find_cursor
from tests.helpers.tables import in_table


def look(text: str) -> Cursor:
    before, cursor, after = text.partition("|")
    assert cursor
    return find_cursor(before + after, len(before))


@in_table
def test_where(text: str, role: str, path: list[str | int], prefix: str) -> None:
    found = look(text)
    if role == "none":
        assert found.role == "none"
        return
    assert (found.role, found.path, found.prefix) == (role, tuple(path), prefix)
    assert found.start == text.index("|") - len(prefix)


@given(st.text(alphabet="ab=[]{}\"'.,#\n \\é", max_size=60), st.integers(0, 60))
def test_any_text_has_a_place(text: str, offset: int) -> None:
    offset = min(offset, len(text))
    found = find_cursor(text, offset)
    if found.role != "none":
        assert text[found.start : offset] == found.prefix


@given(st.text(max_size=40), st.sampled_from(["utf-8", "utf-16", "utf-32"]), st.data())
def test_places_of_the_protocol_lead_back(text: str, encoding: str, data: st.DataObject) -> None:
    lines = Lines(text, PositionCodec(encoding))
    offset = data.draw(st.integers(0, len(text)))
    assert lines.find_offset(*lines.convert_offset(offset)) == offset
