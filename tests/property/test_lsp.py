"""Whatever stands in an editor, the language server has an answer."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from pygls.workspace import PositionCodec

from pi2.lsp.checked import Checked, Lines, explain_place, find_definition, list_fixes
from pi2.lsp.completion import complete

ROOT = Path(__file__).parents[2]
DEMO = (ROOT / "plans/demo.plan.toml").read_text("utf-8")
DEVICE = (ROOT / "plans/devices/oneplus-12.device.toml").read_text("utf-8")

junk = st.sampled_from(
    ["[", "]", "{", "}", '"', "'", '"""', "=", ".", ",", "\n", "#", "[[", "é😀", "\0", "\r",
     "extends = [", 'device = "gh:', "[layers]\n", "[[layers.overrides]]\n", "1.5", "true"]
)  # fmt: skip


@settings(max_examples=30)
@given(st.sampled_from([DEMO, DEVICE, ""]), st.data())
def test_any_text_is_answered(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(text)))
        end = min(len(text), place + data.draw(st.integers(0, 40)))
        text = text[:place] + data.draw(junk) + text[end:]
    name = "oneplus-12.device.toml" if "[units" in text else "x.plan.toml"
    checked = Checked(ROOT / "plans" / name, text)
    lines = Lines(text, PositionCodec())
    for span, item in checked.list_findings():
        first = lines.convert_span(span)
        assert first[:2] <= first[2:]
        assert item.message
        assert all(fix.title and fix.text for fix in list_fixes(checked, span, item))
    offset = data.draw(st.integers(0, len(text)))
    cursor, items = complete(checked, offset)
    assert 0 <= cursor.start <= offset
    assert all(item.insert for item in items)
    before = text[:offset]
    line, column = before.count("\n") + 1, offset - before.rfind("\n")
    explain_place(checked, line, column)
    find_definition(checked, line, column)


def test_texts_of_programs_get_findings_alone() -> None:
    for text in ("a = " + "[" * 5_000, "[\n" * 3_000, "a." * 3_000, "# x\n" * 60_000):
        checked = Checked(ROOT / "plans/x.plan.toml", text)
        assert list(checked.list_findings())
        assert complete(checked, len(text))[1] == []
        assert explain_place(checked, 1, 1) is None
