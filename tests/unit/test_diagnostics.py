"""What diagnostics look like."""

import json

import pytest

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.diagnostics.diagnostic import sort_diagnostics
from pi2.diagnostics.texts import list_formats, render
from pi2.diagnostics.texts import render_concise as concise
from pi2.diagnostics.texts import render_full as full
from pi2.diagnostics.texts import render_json as as_json

TEXT = "\n".join(["[layers]", "split = { cpu = 0.3, npu = 0.8 }", "\tname = '名前' # tab", ""])
SHARES = Diagnostic(
    code="P210",
    message="shares add up to 1.1, expected 1",
    help="lower npu to 0.7",
    span=Span("a.plan.toml", 2, 9, 2, 33),
    notes=("a.plan.toml:1:1: set here",),
    path="layers.split",
)


def draw(span: Span, text: str = TEXT) -> list[str]:
    item = Diagnostic(code="P100", message="m", span=span)
    return full([item], sources={span.file: text}).splitlines()[2:]


def test_full_shows_code_place_line_carets_origin_and_help() -> None:
    assert full([SHARES], sources={"a.plan.toml": TEXT}) == (
        "error[P210]: shares add up to 1.1, expected 1\n"
        " --> a.plan.toml:2:9\n"
        "   |\n"
        " 2 | split = { cpu = 0.3, npu = 0.8 }\n"
        "   |         ^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "   = origin: a.plan.toml:1:1: set here\n"
        "   = help: lower npu to 0.7\n"
    )


def test_concise_is_one_line_each() -> None:
    assert concise([SHARES, SHARES]) == 2 * (
        "a.plan.toml:2:9: error[P210] shares add up to 1.1, expected 1 (lower npu to 0.7)\n"
    )


def test_json_has_every_member() -> None:
    (item,) = json.loads(as_json([SHARES]))
    assert (item["code"], item["severity"]) == ("P210", "error")
    assert item["span"] == {
        "file": "a.plan.toml",
        "line": 2,
        "column": 9,
        "end_line": 2,
        "end_column": 33,
    }
    assert item["notes"] == ["a.plan.toml:1:1: set here"]
    assert json.loads(as_json([])) == []


def test_formats_are_found_by_their_modules() -> None:
    assert {"full", "concise", "json"} <= set(list_formats())
    for name in list_formats():
        assert isinstance(render(name, [SHARES]), str)


def test_tabs_and_wide_characters_keep_carets_in_place() -> None:
    assert draw(Span("f", 3, 2, 3, 6))[1:] == [" 3 |     name = '名前' # tab", "   |     ^^^^"]
    assert draw(Span("f", 3, 9, 3, 13))[2] == "   |            ^^^^^^"


def test_a_span_of_several_lines_ends_with_a_pointer() -> None:
    assert draw(Span("f", 1, 1, 3, 2)) == [
        "   |",
        " 1 | [layers]",
        "   | ^^^^^^^^",
        "   | ... up to line  3",
    ]


def test_long_lines_are_cut_around_the_place() -> None:
    rows = draw(Span("f", 1, 301, 1, 304), "x" * 300 + "abc" + "y" * 300)
    assert len(rows[1]) <= 125 and rows[1].startswith(" 1 | ...x")
    assert rows[1].endswith("y...")
    start = rows[2].index("^")
    assert rows[1][start : start + 3] == "abc"


def test_control_characters_are_shown_and_not_sent() -> None:
    item = Diagnostic(code="P100", message="a\x1b[31mb\n", span=Span("f\x07", 1, 1, 1, 2))
    text = full([item], sources={"f\x07": "\x1b]0;title\x07\u202e"})
    assert "\x1b" not in text and "\u202e" not in text
    assert "\\x1b[31mb\\n" in text and "\\x1b]0;title\\x07\\u202e" in text


def test_a_whole_file_has_no_source_line() -> None:
    item = Diagnostic(code="P001", message="no such file", span=Span.of_file("x"))
    assert full([item]) == "error[P001]: no such file\n --> x\n"


def test_a_place_beyond_the_text_does_no_harm() -> None:
    assert draw(Span("f", 99, 1, 99, 2)) == []
    assert draw(Span("f", 1, 99, 1, 120))[2] == "   |         ^"


def test_colours_only_where_wanted() -> None:
    assert "\x1b" not in full([SHARES], colour=False)
    assert "\x1b[1;31merror[P210]\x1b[0m" in full([SHARES], colour=True)


def test_the_order_is_by_file_and_place() -> None:
    def make(file: str, line: int) -> Diagnostic:
        return Diagnostic(code="P1", message="m", span=Span(file, line, 1, line, 1))

    late, other, early = make("b", 9), make("a", 5), make("b", 2)
    nowhere = Diagnostic(code="P1", message="m")
    assert sort_diagnostics((late, other, early, nowhere)) == (nowhere, early, late, other)


def test_a_user_error_says_everything_in_its_text() -> None:
    error = UserError.of("P501", "no store", help="convert it", file="stores/x")
    assert str(error) == "stores/x: error[P501]: no store\n  help: convert it"
    assert error.exit_code == 2
    assert UserError([SHARES]).exit_code == 1
    with pytest.raises(AssertionError):
        UserError([])
