"""Whatever stands in a file, checking it ends with findings or a plan, never with an exception."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing.documents import write_document
from fuzzing.files import list_keys, set_value
from fuzzing.gguf import write_gguf
from fuzzing.seeds import read_gguf_seed
from pi2.diagnostics import UserError
from pi2.diagnostics.texts import list_formats, render
from pi2.fitting.check import Report, check_file, check_plan, load_plan
from pi2.plan.toml.source import parse_source
from pi2.plan.toml.text import KeyPath, format_path, write_key, write_value
from pi2.weights.file_reading import FileFiller, check_document
from tests.helpers.slow import mark_slow
from tests.helpers.tables import in_table

ROOT = Path(__file__).parents[2]
DEMO = (ROOT / "plans/demo.plan.toml").read_bytes()
MODEL = (ROOT / "plans/models/pi2-demo.model.toml").read_bytes()
DEVICE = (ROOT / "plans/devices/xiaomi-14.device.toml").read_bytes()

scalars = (
    st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.dates()
    | st.times()
    | st.sampled_from(["4 MiB", "0-7", "cpu", "0-3,3-5", "1e3"])
)
toml_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(["cpu", "hot"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("robust")


def check(folder: Path, kind: str, data: bytes) -> Report:
    path = folder / f"x.{kind}.toml"
    path.write_bytes(data)
    report = check_file(path)
    for name in list_formats():
        render(name, report.diagnostics, colour=True, sources=report.sources)
    assert report.is_sound or report.resolved is None
    for item in report.diagnostics:
        assert item.span is not None and item.span.line >= 1
        assert item.span.column >= 1
        assert (item.span.line, item.span.column) <= (item.span.end_line, item.span.end_column)
    return report


kinds = st.sampled_from(["plan", "device", "model"])


@given(kind=kinds, data=st.binary(max_size=400))
@example(kind="plan", data=b"\xef\xbb\xbf")
@example(kind="plan", data=b"a=" + b"[" * 3000)
@example(kind="plan", data=b"a" + b".a" * 3000 + b"=1")
@example(kind="plan", data=b"[a" + b".a" * 900 + b"]")
@example(kind="plan", data=b"a=" + b"9" * 5000)
@example(kind="plan", data=b"a=0x" + b"f" * 9000)
@example(kind="model", data=b"schema_version=0x" + b"f" * 9000)
@example(kind="plan", data=b"schema_version = 3\nlayers.overrides = [{}, 3]\n")
def test_bytes(folder: Path, kind: str, data: bytes) -> None:
    check(folder, kind, data)


@given(kind=kinds, text=st.text(alphabet=' \n"=[]{}.,#\\abcu0189-_é\t\r', max_size=120))
def test_texts_that_look_like_toml(folder: Path, kind: str, text: str) -> None:
    check(folder, kind, text.encode())


@st.composite
def damaged_documents(draw: st.DrawFn) -> tuple[str, bytes]:
    """A sound document with a stretch removed, doubled or replaced."""
    kind, data = draw(st.sampled_from([("plan", DEMO), ("model", MODEL), ("device", DEVICE)]))
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 60)))
    new = draw(
        st.binary(max_size=8)
        | st.sampled_from(
            [data[start:end] * 2, b"[", b'"', b"\n", b"{}", b"[[layers.overrides]]\n"]
        )
    )
    return kind, data[:start] + new + data[end:]


@given(document=damaged_documents())
def test_damaged_documents(folder: Path, document: tuple[str, bytes]) -> None:
    check(folder, *document)


def list_paths(values: object, base: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [base] if base else []
    if isinstance(values, dict):
        for key, item in values.items():
            found += list_paths(item, (*base, key))
    elif isinstance(values, list):
        for number, item in enumerate(values):
            found += list_paths(item, (*base, number))
    return found


@st.composite
def changed_documents(draw: st.DrawFn) -> tuple[str, bytes]:
    """A sound document in which one value is something else, written on inline tables."""
    kind, data = draw(st.sampled_from([("plan", DEMO), ("model", MODEL), ("device", DEVICE)]))
    values = tomli.loads(data.decode())
    path = draw(st.sampled_from(list_paths(values)))
    holder: Any = values
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = draw(toml_values)
    text = "".join(f"{write_key(key)} = {write_value(item)}\n" for key, item in values.items())
    return kind, text.encode("utf-8", "replace")


@given(document=changed_documents())
def test_changed_values(folder: Path, document: tuple[str, bytes]) -> None:
    check(folder, *document)


settable = st.sampled_from(
    [
        "decode.predictor", "decode.threshold", "layers.hot", "layers.split", "layers.split.cpu",
        "layers.overrides", "layers.overrides.0.hot", "layers.overrides.0.select", "memory",
        "memory.budget", "memory.segments.kv", "bundle.stride", "kv.context", "device", "model",
        "store", "backends.cpu", "schema_version",
    ]
) | st.text(max_size=12)  # fmt: skip


@given(overrides=st.dictionaries(settable, toml_values, max_size=3))
@example(overrides={"device": "x\0y.device.toml"})
@example(overrides={"device": "../x" * 200 + ".toml"})
@example(overrides={"model": "/"})
@example(overrides={"weights": "\udc80"})
@example(overrides={"": 1, "a..b": 2, "layers.overrides.99999999999999999999.hot": 1})
def test_overrides(overrides: dict[str, object]) -> None:
    report = check_plan(ROOT / "plans/demo.plan.toml", overrides=overrides)
    for name in list_formats():
        render(name, report.diagnostics, sources=report.sources)
    assert (report.resolved is None) == (not report.is_sound)


@given(data=st.binary(max_size=60))
def test_load_plan_raises_user_errors_only(folder: Path, data: bytes) -> None:
    path = folder / "y.plan.toml"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        load_plan(path)
    assert caught.value.exit_code == 1


@given(values=st.dictionaries(st.text(max_size=8), toml_values, max_size=4))
def test_written_values_read_back(values: dict[str, object]) -> None:
    text = "".join(f"{write_key(key)} = {write_value(item)}\n" for key, item in values.items())
    # Compared as written: nan is not equal to itself.
    assert write_value(tomli.loads(text)) == write_value(values)


@given(text=st.text(max_size=200))
def test_parsing_is_total(text: str) -> None:
    source = parse_source(Path("x.plan.toml"), "x.plan.toml", text)
    if not isinstance(source, list):
        assert source.spans.find_value(()).file == "x.plan.toml"


@pytest.fixture(scope="module")
def beside_a_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("file")
    (folder / "m.gguf").write_bytes(write_gguf(*read_gguf_seed()))
    return folder


ANYTHING = [
    *(3, -1, 1.5, float("inf"), 10**400, True, "x", "-1 GiB", "100 %", date(2026, 1, 1)),
    *([], ["x"], [{}], {"x": 1}, {"cpu": -1}),
]  # fmt: skip
STORE = {"weights": "w", "device": "oneplus-12", "model": "bamboo-7b"}
FILE = {"weights": "m.gguf"}


def check_value(folder: Path, said: dict[str, Any], key: KeyPath, value: object) -> None:
    """A plan that leaves all else out ends with findings that have a place, in the file as in an
    override."""
    usual = {"schema_version": 3, **said}
    plain, path = folder / "plain.plan.toml", folder / "x.plan.toml"
    plain.write_text(write_document(usual))
    values = dict(usual)
    set_value(values, key, value)
    path.write_text(write_document(values))
    for report in (
        check_document(path),
        check_plan(plain, overrides={format_path(key): value}, fill=FileFiller()),
    ):
        assert report.is_sound or report.resolved is None
        for item in report.diagnostics:
            assert item.span is not None and item.span.line >= 1


@pytest.mark.parametrize(
    ("shift", "step"), [(0, 8), *(mark_slow((shift, 1)) for shift in range(len(ANYTHING)))]
)
@pytest.mark.parametrize("said", [FILE, STORE], ids=["file", "store"])
def test_any_value_at_any_key(
    beside_a_file: Path, said: dict[str, Any], shift: int, step: int
) -> None:
    for number, key in enumerate(list_keys()[::step], shift):
        check_value(beside_a_file, said, key, ANYTHING[number % len(ANYTHING)])


@in_table
def test_nothing_is_derived_from_what_the_schema_refuses(
    beside_a_file: Path, key: KeyPath, value: object
) -> None:
    check_value(beside_a_file, STORE, key, value)


@pytest.mark.parametrize(
    ("line", "found"),
    [("[[kv]]\ncontext = 64", "an array"), ("kv = 3", "3"), ("memory = true", "true")],
)
def test_a_table_that_is_none_is_named_in_a_plan_of_a_file(
    beside_a_file: Path, line: str, found: str
) -> None:
    path = beside_a_file / "x.plan.toml"
    path.write_text(f'schema_version = 3\nweights = "m.gguf"\n{line}\n')
    (item,) = check_document(path).diagnostics
    assert (item.code, item.message.partition(", ")[2]) == ("P103", f"got {found}")
    assert item.span is not None and item.span.line == 3
