"""Laws of the plan language: places, quantities, selectors, digests, what `show` prints."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pi2.authoring.writing import write_plan
from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.texts import render_full as full
from pi2.fitting.check import load_plan
from pi2.plan.documents.plan_units import list_layers
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    HERTZ_UNITS,
    RATE_UNITS,
    SECOND_UNITS,
    WATT_UNITS,
    Units,
    compare_bytes,
    format_bytes,
    format_quantity,
    parse_quantity,
    write_least,
    write_most,
)
from pi2.plan.toml.spans import index_spans
from pi2.plan.toml.text import KeyPath, write_key, write_value

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "plans/demo.plan.toml"

keys = st.text(alphabet='abc-_é名💾" .', min_size=1, max_size=5)
values = st.recursive(
    st.integers(-9, 99) | st.text(alphabet='aé名💾\t "\\', max_size=5) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
tables = st.dictionaries(keys, values, max_size=4)


def write_document(tree: dict[str, Any], header: tuple[str, ...], flat: bool) -> str:
    """Write a tree with headers and arrays of tables, or flat with dotted keys."""
    lines, below = [], []
    for key, value in tree.items():
        if isinstance(value, dict) and value and flat:
            for inner, item in value.items():
                lines.append(f"  {write_key(key)} . {write_key(inner)} = {write_value(item)} # é")
        elif isinstance(value, dict):
            below.append((f"[{'.'.join(map(write_key, (*header, key)))}]", value, (*header, key)))
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            name = ".".join(map(write_key, (*header, key)))
            below += [(f"[[ {name} ]]", item, (*header, key)) for item in value]
        else:
            lines.append(f"\t{write_key(key)} ={write_value(value)}")
    for head, table, path in below:
        lines += ["", head + " # 名前", write_document(table, path, flat)]
    return "\n".join(lines) + "\n"


def list_paths(tree: Any, base: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    found: list[tuple[KeyPath, Any]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        found.append(((*base, key), value))
        if isinstance(value, dict | list):
            found += list_paths(value, (*base, key))
    return found


def cut(text: str, span: Span) -> str:
    lines = text.split("\n")[span.line - 1 : span.end_line]
    lines[-1] = lines[-1][: span.end_column - 1]
    lines[0] = lines[0][span.column - 1 :]
    return "\n".join(lines)


@given(tree=tables, flat=st.booleans())
@example(tree={"a": [{"b": {"c": 1}}, {"b": {"c": 2}}]}, flat=False)
def test_every_key_and_value_is_found_where_it_stands(tree: dict[str, Any], flat: bool) -> None:
    text = write_document(tree, (), flat)
    parsed = tomli.loads(text)
    index = index_spans("x.toml", text)
    assert index.errors == [] and index.duplicates == []
    for path, value in list_paths(parsed):
        assert index.has(path), path
        if isinstance(path[-1], str):
            written = cut(text, index.keys[path])
            if not written.startswith("["):  # the header of an array's item
                assert tomli.loads(f"{written} = 1") == {path[-1]: 1}
        if path in index.values and path not in index.headers:
            assert tomli.loads(f"x = {cut(text, index.values[path])}") == {"x": value}
        elif path in index.headers:
            assert cut(text, index.values[path]).startswith("[")


units = st.sampled_from([BYTE_UNITS, RATE_UNITS, HERTZ_UNITS, SECOND_UNITS, WATT_UNITS])


@given(units=units, data=st.data(), number=st.decimals(0, 10**9, places=3))
def test_a_written_quantity_reads_back_exactly(
    units: Units, data: st.DataObject, number: object
) -> None:
    unit = data.draw(st.sampled_from(sorted(units)))
    value = parse_quantity(f"{number} {unit}", units)
    assert parse_quantity(format_quantity(value, units), units) == value


@given(value=st.floats(1e-12, 1e18))
def test_a_float_survives_as_a_quantity(value: float) -> None:
    for units in (HERTZ_UNITS, SECOND_UNITS, WATT_UNITS):
        assert float(parse_quantity(format_quantity(value, units), units)) == value


@given(size=st.integers(0, 2**63 - 1))
def test_bytes_are_written_exactly(size: int) -> None:
    assert parse_quantity(format_bytes(size), BYTE_UNITS) == Fraction(size)


@given(size=st.integers(1, 2**50))
def test_a_size_for_people_is_little_more_or_less(size: int) -> None:
    least, most = (parse_quantity(write(size), BYTE_UNITS) for write in (write_least, write_most))
    assert size <= least <= 1.25 * size
    assert 0.75 * size <= most <= size


@given(sizes=st.lists(st.integers(0, 2**50), min_size=2, max_size=3))
def test_sizes_that_differ_are_written_differently(sizes: list[int]) -> None:
    assert len(set(compare_bytes(*sizes))) == len(set(sizes))


@given(size=st.integers(2**20, 2**49))
def test_what_a_message_says_to_write_is_a_size_of_few_digits(size: int) -> None:
    assert sum(letter.isdigit() for letter in write_least(size)) <= 9


@given(layers=st.sets(st.integers(0, 40), min_size=1))
def test_a_selector_names_its_layers(layers: set[int]) -> None:
    text = ", ".join(str(layer) for layer in sorted(layers))
    assert list(list_layers(text, 41)) == sorted(layers)
    low, high = min(layers), max(layers)
    assert list(list_layers(f"{low}-{high}", 41)) == list(range(low, high + 1))


shares = st.integers(0, 8).map(lambda eighths: eighths / 8)


@st.composite
def sound_changes(draw: st.DrawFn) -> dict[str, object]:
    """Overrides that leave the demo plan sound."""
    split = draw(st.integers(1, 7))
    hot = draw(shares)
    changes: dict[str, object] = {
        "memory.budget": "2 GiB",
        "memory.segments.hot": "4 MiB",
        "memory.segments.predictor": "4 MiB",
        "layers.hot": draw(shares),
        "layers.overrides": [
            {"select": f"0-{split - 1}", "hot": hot},
            {"select": f"{split}-7", "split": {"cpu": 1.0}},
        ],
    }
    changes["decode.predictor"] = draw(st.sampled_from(["none", "gate", "low-rank"]))
    changes["kv.context"] = draw(st.integers(200, 1024))
    changes["decode.threshold"] = draw(st.floats(-5, 5))
    changes["name"] = draw(st.text(max_size=20))
    return changes


@given(changes=sound_changes())
def test_what_show_prints_resolves_to_the_same_plan(
    changes: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    resolved = load_plan(DEMO, overrides=changes)
    text = write_plan(resolved)
    path = tmp_path_factory.mktemp("shown") / "demo.plan.toml"
    path.write_text(text, "utf-8", newline="")
    again = load_plan(path)
    assert again.digest == resolved.digest
    assert again.layers[0].hot_neurons == resolved.layers[0].hot_neurons
    assert write_plan(again) == text


@given(changes=sound_changes())
def test_the_digest_sees_what_runs_and_nothing_else(changes: dict[str, object]) -> None:
    resolved = load_plan(DEMO, overrides=changes)
    renamed = load_plan(DEMO, overrides={**changes, "name": "x", "description": "y"})
    assert renamed.digest == resolved.digest
    assert load_plan(DEMO, overrides={**changes, "io.threads": 7}).digest != resolved.digest


@given(
    line=st.text(max_size=300).filter(lambda text: "\n" not in text),
    first=st.integers(1, 320),
    length=st.integers(0, 320),
    lines=st.integers(0, 2),
    number=st.integers(1, 3),
)
def test_carets_stand_below_the_text(
    line: str, first: int, length: int, lines: int, number: int
) -> None:
    span = Span("f", number, first, number + lines, first + length)
    assume(not span.is_whole_file)
    item = Diagnostic(code="P100", message="m\x1b[2J", help="h", span=span, notes=("n",))
    text = full([item], sources={"f": f"\n{line}\n"})
    assert "\x1b" not in text
    assert text.isprintable() or set(text) - {"\n"} == {c for c in text if c.isprintable()}
    marks = [row for row in text.splitlines() if set(row) <= set(" |^") and "^" in row]
    assert len(marks) == 1
