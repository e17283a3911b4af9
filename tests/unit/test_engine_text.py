"""Stop strings across pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pi2.engine.text import StopFilter


def test_text_before_a_stop_string_is_all_that_comes_out() -> None:
    stop_filter = StopFilter(["\n\n"])
    pieces = [stop_filter.push(piece) for piece in ["a\n", "b\n", "\nc", "d"]]
    assert "".join(pieces) == "a\nb"
    assert stop_filter.stopped


def test_what_only_looked_like_a_stop_string_is_given_back_at_the_end() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("xEN") == "x"
    assert stop_filter.flush() == "EN"


def test_without_stop_strings_nothing_is_held() -> None:
    stop_filter = StopFilter([])
    assert stop_filter.push("abc") == "abc"


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_any_cut_of_the_text_gives_the_same_output(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    expected = text[: min(found)] if found else text
    stop_filter = StopFilter(stops)
    output = "".join([stop_filter.push(piece) for piece in pieces])
    output += "" if stop_filter.stopped else stop_filter.flush()
    # A stop string may complete earlier than another one that begins before it.
    assert text.startswith(output)
    assert len(output) >= len(expected)
    if len(stops) < 2:
        assert output == expected
