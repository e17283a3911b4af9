"""Where a cursor stands in a text that is still being written; ``|`` is the cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.lsp.checked import Lines
from pi2.lsp.completion import Cursor, find_cursor


def look(text: str) -> Cursor:
    before, cursor, after = text.partition("|")
    assert cursor
    return find_cursor(before + after, len(before))


@pytest.mark.parametrize(
    ("text", "role", "path", "prefix"),
    [
        ("|", "key", (), ""),
        ("mem|", "key", (), "mem"),
        ("a = 1\nme|\n[b]", "key", (), "me"),
        ("[memory]\nbu|", "key", ("memory",), "bu"),
        ("memory.seg|", "key", ("memory",), "seg"),
        ("[kv]\n[memory.segments]\n|", "key", ("memory", "segments"), ""),
        ("[[layers.overrides]]\n[[layers.overrides]]\ns|", "key", ("layers", "overrides", 1), "s"),
        ("[mem|", "header", (), "mem"),
        ("[memory.|", "header", ("memory",), ""),
        ("[[layers.o|]]", "header", ("layers",), "o"),
        ("device = |", "value", ("device",), ""),
        ('device = "on|', "value", ("device",), "on"),
        ('device = "on|e"\nmodel = "x"', "value", ("device",), "on"),
        ("[decode]\npredictor = 'ga|", "value", ("decode", "predictor"), "ga"),
        ('extends = ["a", "b|"]', "value", ("extends", 1), "b"),
        ('extends = [\n  "a",  # one\n  |\n]', "value", ("extends", 1), ""),
        ("[layers]\nsplit = { cp|", "key", ("layers", "split"), "cp"),
        ("[layers]\nsplit = { cpu = 0.5, n|", "key", ("layers", "split"), "n"),
        ("[layers]\nsplit = { cpu = |", "value", ("layers", "split", "cpu"), ""),
        ("clusters = [{ id = 'a' }, { co|", "key", ("clusters", 1), "co"),
        ('text = """a\nb = |', "value", ("text",), "a\nb = "),
        ("a = 1 # [x|", "none", (), ""),
        ('a = "x" |', "none", ("a",), ""),
        ("[a] |", "none", (), ""),
        ("a = [1, 2]\nb|", "key", (), "b"),
        ("a = { b = [1, { c = 2 }] }\nd|", "key", (), "d"),
    ],
)
def test_where(text: str, role: str, path: tuple[str | int, ...], prefix: str) -> None:
    found = look(text)
    if role == "none":
        assert found.role == "none"
        return
    assert (found.role, found.path, found.prefix) == (role, path, prefix)
    assert found.start == text.index("|") - len(prefix)


@given(st.text(alphabet="ab=[]{}\"'.,#\n \\é", max_size=60), st.integers(0, 60))
def test_any_text_has_a_place(text: str, offset: int) -> None:
    offset = min(offset, len(text))
    found = find_cursor(text, offset)
    if found.role != "none":
        assert text[found.start : offset] == found.prefix


@given(st.text(max_size=40), st.sampled_from(["utf-8", "utf-16", "utf-32"]), st.data())
def test_places_of_the_protocol_lead_back(text: str, encoding: str, data: st.DataObject) -> None:
    lines = Lines(text, encoding)  # type: ignore[arg-type]
    offset = data.draw(st.integers(0, len(text)))
    assert lines.find_offset(*lines.convert_offset(offset)) == offset
