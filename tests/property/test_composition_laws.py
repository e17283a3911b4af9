"""Laws of composition: merging is associative and idempotent, origins are true, nothing crashes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import example, given
from hypothesis import strategies as st

from pi2.authoring.writing import write_plan
from pi2.cli.main import run
from pi2.fitting.check import Report, check_file
from pi2.plan.reading.compose import Composition, parse_key, trace_value
from pi2.plan.reading.trees import Node, build_tree, extract_values, find_node, merge_trees
from pi2.plan.toml.source import SourceFile, parse_source
from pi2.plan.toml.text import KeyPath, look_up, write_key, write_value

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "tests/plans/broken/parts"
HOSTILE = ROOT / "tests/plans/hostile"

# Documents whose keys have one shape everywhere, as a schema gives it: associativity is promised
# for those.  A key that is a table here and a number there is a mistake, and is reported.
scalars = st.integers(0, 9) | st.booleans() | st.text("ab", max_size=2)
arrays = st.lists(st.integers(0, 9), min_size=1, max_size=3)


def make_tables(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    entries = st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=3).map(
        lambda items: [{**item, "id": name} for name, item in items.items()]
    )
    return st.fixed_dictionaries(
        {}, optional={"s": scalars, "r": scalars, "a": arrays, "t": inner, "u": inner, "k": entries}
    )


documents = st.recursive(
    st.fixed_dictionaries({}, optional={"s": scalars, "a": arrays}), make_tables, max_leaves=6
)


def read(name: str, values: dict[str, Any]) -> Node:
    return build_tree(SourceFile(Path(name), name, "", values), values)


def merge(*trees: Node) -> Node:
    result = trees[0]
    for tree in trees[1:]:
        result = merge_trees(result, tree)
    return result


@given(a=documents, b=documents, c=documents)
def test_merging_is_associative(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    x, y, z = read("a", a), read("b", b), read("c", c)
    left, right = merge(merge(x, y), z), merge(x, merge(y, z))
    assert extract_values(left) == extract_values(right)
    assert left == right  # origins too


@given(a=documents)
def test_merging_with_itself_or_nothing_changes_nothing(a: dict[str, Any]) -> None:
    for pair in [(a, a), (a, {}), ({}, a)]:
        assert extract_values(merge(read("x", pair[0]), read("y", pair[1]))) == a


@given(a=documents, b=documents)
def test_what_a_document_says_itself_counts(a: dict[str, Any], b: dict[str, Any]) -> None:
    merged = merge(read("a", a), read("b", b))
    for path, value in list_leaves(b):
        node, rest = find_node(merged, path)
        if not any(isinstance(part, int) for part in path):
            assert rest == ()
            assert extract_values(node) == value


def list_leaves(values: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    if isinstance(values, dict):
        return [leaf for key, item in values.items() for leaf in list_leaves(item, (*path, key))]
    is_table = isinstance(values, list) and all(isinstance(item, dict) for item in values)
    if is_table:
        return [
            leaf
            for number, item in enumerate(values)
            for leaf in list_leaves(item, (*path, number))
        ]
    return [(path, values)]


@given(items=st.lists(documents, min_size=1, max_size=4))
def test_every_value_stands_where_its_origin_says(items: list[dict[str, Any]]) -> None:
    merged = merge(*(read(str(number), item) for number, item in enumerate(items)))
    for path, value in list_leaves(extract_values(merged)):
        node, rest = find_node(merged, path)
        assert rest == ()
        place = node.places[-1]
        assert look_up(place.file.values, place.path) == value


# Files
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("composed")
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, folder)
    return folder


def write(path: Path, values: dict[str, Any], **composition: Any) -> Path:
    merged = {"schema_version": 3, **composition, **values}
    text = "".join(f"{write_key(key)} = {write_value(item)}\n" for key, item in merged.items())
    path.write_text(text, "utf-8", newline="")
    return path


plan_parts = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=5),
        "io": st.fixed_dictionaries({}, optional={"threads": st.integers(1, 8)}),
        "layers": st.fixed_dictionaries(
            {},
            optional={
                "hot": st.sampled_from([0.1, 0.2]),
                "overrides": st.lists(
                    st.fixed_dictionaries(
                        {"select": st.sampled_from(["0", "1-2", "7"]), "hot": st.just(0.125)}
                    ),
                    min_size=1,
                    max_size=2,
                ),
            },
        ),
        "prefill": st.fixed_dictionaries({"chunk": st.integers(1, 64)}),
    },
)


@given(parts=st.lists(plan_parts, min_size=2, max_size=3), join=st.sampled_from([None, "append"]))
def test_resolving_is_deterministic_and_idempotent(
    folder: Path, parts: list[dict[str, Any]], join: str | None
) -> None:
    names = []
    for number, part in enumerate(parts[:-1]):
        names.append(write(folder / f"part-{number}.toml", part).name)
    extra: dict[str, Any] = {"extends": ["base.plan.toml", *names]}
    if join is not None and "overrides" in parts[-1].get("layers", {}):
        extra["inherit"] = {"layers": {"overrides": join}}
    path = write(folder / "my.plan.toml", parts[-1], **extra)
    first, second = check_file(path).resolved, check_file(path).resolved
    assert first is not None
    assert second is not None and first.digest == second.digest
    shown = folder / "shown.plan.toml"
    shown.write_text(write_plan(first), "utf-8", newline="")
    again = check_file(shown).resolved
    assert again is not None and again.digest == first.digest
    assert write_plan(again) == write_plan(first)


@given(a=plan_parts, b=plan_parts)
def test_a_list_and_a_chain_of_documents_are_the_same(
    folder: Path, a: dict[str, Any], b: dict[str, Any]
) -> None:
    write(folder / "a.toml", a, extends=["base.plan.toml"])
    write(folder / "b.toml", b)
    write(folder / "b-on-a.toml", b, extends=["a.toml"])
    in_a_list = check_file(write(folder / "x.plan.toml", {}, extends=["a.toml", "b.toml"]))
    in_a_chain = check_file(write(folder / "y.plan.toml", {}, extends=["b-on-a.toml"]))
    assert in_a_list.resolved is not None
    assert in_a_chain.resolved is not None
    assert in_a_list.resolved.digest == in_a_chain.resolved.digest


# Whatever stands in the files


odd = st.recursive(
    st.booleans()
    | st.integers(-3, 2**65)
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.sampled_from(["append", "prepend", "a.toml", "b.toml", "io.threads", "layers", "demo"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["layers", "overrides", "hot", "id", "é", "kv"]), inner)
    ),
    max_leaves=8,
)
names = st.sampled_from(["a.toml", "b.toml", "c.toml", "my.plan.toml", "base.plan.toml", "gone"])
fuzzed = st.fixed_dictionaries(
    {},
    optional={
        "extends": st.lists(names | st.text(max_size=8), max_size=4) | odd,
        "remove": st.lists(st.sampled_from(["io", "layers.hot", "a..b", "kv.context"])) | odd,
        "inherit": odd, "layers": odd, "memory": odd, "kv": odd, "device": odd, "weights": odd,
        "schema_version": st.integers(-1, 4) | odd,
    },
)  # fmt: skip


def check_report(report: Report) -> None:
    for item in report.diagnostics:
        assert item.span is not None
        if not item.span.is_whole_file and item.span.file in report.sources:
            assert item.span.line <= report.sources[item.span.file].count("\n") + 1


@given(files=st.tuples(fuzzed, fuzzed, fuzzed, fuzzed))
@example(files=({"extends": ["a.toml"]}, {"extends": ["a.toml"]}, {}, {}))
@example(files=({"extends": ["a\0.toml"]}, {}, {}, {}))
@example(files=({"extends": ["x" * 400]}, {}, {}, {}))
@example(files=({"extends": ["/"]}, {}, {}, {}))
@example(files=({"extends": ["base.plan.toml"], "remove": ["schema_version"]}, {}, {}, {}))
@example(files=({"extends": ["base.plan.toml"], "remove": ["layers.overrides.0"]}, {}, {}, {}))
@example(files=({"extends": ["base.plan.toml"], "inherit": {"layers": "append"}}, {}, {}, {}))
@example(files=({"extends": ["base.plan.toml"], "layers": [1], "memory": 2}, {}, {}, {}))
def test_composition_is_total(folder: Path, files: tuple[dict[str, Any], ...]) -> None:
    for name, values in zip(("my.plan.toml", "a.toml", "b.toml", "c.toml"), files, strict=True):
        text = "".join(f"{write_key(key)} = {write_value(item)}\n" for key, item in values.items())
        (folder / name).write_text(text, "utf-8", "replace", newline="")
    report = check_file(folder / "my.plan.toml")
    check_report(report)
    source = report.files.get("plan")
    if source is not None:
        for path, _ in list_leaves(source.values):
            trace_value(source, path)


@given(text=st.text(alphabet="abc.\"'=\n# []\\u0", max_size=12))
def test_key_paths_are_keys_or_nothing(text: str) -> None:
    found = parse_key(text)
    assert found is None or all(isinstance(name, str) for name in found)


@given(keys=st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_key_path_can_be_written(keys: list[str]) -> None:
    text = ".".join(write_key(key) for key in keys)
    found = parse_key(text)
    special = any(char in text for char in "\n=#")
    assert found == keys or (special and found is None)


@given(data=st.binary(max_size=200))
def test_a_base_may_be_anything(folder: Path, data: bytes) -> None:
    (folder / "a.toml").write_bytes(data)
    path = write(folder / "my.plan.toml", {}, extends=["base.plan.toml", "a.toml"])
    check_report(check_file(path))


def test_composing_does_not_change_what_was_read() -> None:
    text = 'schema_version = 3\nextends = ["base.plan.toml"]\n[io]\nthreads = 2\n'
    source = parse_source(PARTS / "x.plan.toml", "x.plan.toml", text)
    assert isinstance(source, SourceFile)
    before = tomli.loads(text)
    Composition(source, "plan")
    assert source.values == before


@pytest.mark.parametrize("path", sorted(HOSTILE.glob("*.toml")), ids=lambda path: path.name)
@pytest.mark.parametrize(
    "command",
    [["validate"], ["show"], ["migrate", "--check"], ["explain", "kv.context"]],
    ids="-".join,
)
def test_hostile_documents_are_answered(
    path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, str(path)]) in (0, 1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert len(captured.out + captured.err) < 200_000
