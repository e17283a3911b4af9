"""References to documents elsewhere: what is taken, and where a fault is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi2.diagnostics import UserError
from pi2.sharing.references import MAX_LENGTH, join_reference, parse_reference
from tests.helpers.tables import in_table

COMMIT = "4f0568861877fba9991312b38040614874b5cf15"


@in_table
def test_its_parts(text: str, url: str, path: str | None, revision: str) -> None:
    found = parse_reference(text)
    assert (found.url, found.revision) == (url, revision)
    assert found.path == ("acme-12.device.toml" if path is None else path)


@in_table
def test_a_fault_is_pointed_at(text: str, code: str, marked: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_reference(text)
    (found,) = caught.value.diagnostics
    assert found.code == code and found.span is not None
    assert text[found.span.column - 1 : found.span.end_column - 1] == marked
    assert caught.value.sources == {"reference": text}


def test_a_long_one_is_refused() -> None:
    with pytest.raises(UserError, match="P701"):
        parse_reference("gh:a/b//" + "x" * MAX_LENGTH)


PIECES = st.sampled_from(
    ["gh:", "git+file:", "https:", "//", "/", "@", "..", "a", "h.example", ":", "v1", "[",
     ".device.toml", "é", "\0", "%", "?", " "]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join)))
def test_any_text_is_taken_or_refused_with_a_place(text: str) -> None:
    try:
        found = parse_reference(text)
    except UserError as error:
        (item,) = error.diagnostics
        assert item.code.startswith("P70") and item.span is not None
        assert 1 <= item.span.column < item.span.end_column <= max(len(text), MAX_LENGTH) + 2
    else:
        assert found.text == text and ".." not in found.path.split("/")


@in_table
def test_a_path_inside_a_document_is_seen_from_there(
    reference: str, relative: str, joined: str
) -> None:
    assert join_reference(reference, relative) == joined


@in_table
def test_a_path_that_leads_out_is_refused(reference: str, relative: str) -> None:
    with pytest.raises(UserError, match="P705"):
        join_reference(reference, relative)
