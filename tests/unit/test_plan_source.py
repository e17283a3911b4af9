"""Files that cannot be read, or are no documents, get a finding of their own."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pi2.authoring.writing import write_plan
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.check import check_file, load_plan
from pi2.fitting.inspection import Reuse
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.reading import references
from pi2.plan.reading.references import Located, has_scheme, list_documents
from pi2.plan.toml.source import (
    MAX_BYTES,
    Kind,
    SourceFile,
    display_path,
    parse_assignments,
    read_source,
)
from tests.helpers.tables import in_table

Patch = pytest.MonkeyPatch


def find_only(path: Path) -> Diagnostic:
    findings = check_file(path).diagnostics
    assert len(findings) == 1, findings
    return findings[0]


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "demo.plan.toml").write_text("")
    finding = find_only(tmp_path / "dmeo.plan.toml")
    assert (finding.code, finding.message) == ("P001", "no such file")
    assert finding.help is not None and finding.help.endswith("demo.plan.toml?")


def test_what_is_no_readable_file_is_a_finding(tmp_path: Path) -> None:
    cases: list[tuple[str, Callable[[Path], object], set[str]]] = [
        ("folder", Path.mkdir, {"P002"}),
        ("pipe", os.mkfifo, {"P002"}),
        ("loop", lambda path: path.symlink_to(path), {"P001", "P003"}),
        ("x" * 5000, lambda path: None, {"P003"}),
        ("file/y", lambda path: path.parent.write_text(""), {"P001"}),
    ]
    for name, put, codes in cases:
        path = tmp_path / f"{name}.plan.toml"
        put(path)
        assert find_only(path).code in codes, name


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.plan.toml"
    path.write_text("a = 1")
    path.chmod(0)
    finding = find_only(path)
    assert (finding.code, finding.message) == ("P003", "permission denied")


def test_a_name_with_a_nul_byte() -> None:
    finding = find_only(Path("x\0.plan.toml"))
    assert (finding.code, finding.message) == ("P003", "cannot be read: the name has a NUL byte")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.plan.toml"
    path.write_bytes(b"# " + b"x" * MAX_BYTES)
    finding = find_only(path)
    assert finding.code == "P004" and "1,048,578 bytes" in finding.message


def test_a_large_file_is_checked_in_bearable_time(tmp_path: Path) -> None:
    path = tmp_path / "x.plan.toml"
    path.write_text("schema_version = 3\n" + "".join(f"k{i} = {i}\n" for i in range(20_000)))
    findings = check_file(path).diagnostics
    assert "more findings in this file" in findings[-1].message or len(findings) <= 101


@pytest.mark.parametrize(
    ("data", "line", "column"),
    [
        (b"\xff", 1, 1),
        (b"a = 1\nb = '\xe9'\n", 2, 6),
        ("ä = 'ö".encode() + b"\x80", 1, 7),
        (b"a = '\xed\xa0\x80'", 1, 6),
    ],
)
def test_the_byte_that_is_not_utf_8(data: bytes, line: int, column: int, tmp_path: Path) -> None:
    path = tmp_path / "x.plan.toml"
    path.write_bytes(data)
    finding = find_only(path)
    assert finding.code == "P006" and finding.span is not None
    assert (finding.span.line, finding.span.column) == (line, column)


def test_positions_wait_until_they_are_asked_for(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "x.plan.toml"
    path.write_text("a = 1\n")

    def refuse(name: str, text: str) -> None:
        raise AssertionError("positions were not needed")

    monkeypatch.setattr("pi2.plan.toml.spans.index_spans", refuse)
    assert isinstance(read_source(path, "x"), SourceFile)


def test_names_are_relative_below_the_working_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "a" / "b.toml") == os.path.join("a", "b.toml")
    assert display_path(Path("/nowhere/b.toml")) == "/nowhere/b.toml"


ROOT = Path(__file__).parents[2]


PARTS = ROOT / "tests/plans/broken/parts"


def test_paths_are_relative_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PARTS / "base.plan.toml"
    resolved = load_plan(plan, overrides={"weights": Path("elsewhere")})
    assert resolved.store_path == PARTS / "elsewhere"
    assert (resolved.device.id, resolved.model.id) == ("phone", "small")
    monkeypatch.chdir("/")
    assert load_plan(plan, overrides={"weights": "elsewhere"}).digest == resolved.digest


@in_table
def test_assignments_are_toml_or_text(text: str, value: object) -> None:
    assert parse_assignments((text,)) == {"a": value}


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=[1", 'a="x', "a={", "a=1\nb=2"])
def test_broken_assignments_are_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_assignments((text,))
    assert (caught.value.diagnostics[0].code, caught.value.exit_code) == ("P016", 2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "common"
    folder.mkdir()
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, folder)
    return folder / "base.plan.toml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"schema_version = 3\n{text}")
    return path


def extend(base: Path, text: str) -> ResolvedPlan:
    head = 'extends = ["common/base.plan.toml"]\n'
    return load_plan(write(base.parents[1] / "my.plan.toml", head + text))


def find(path: Path) -> tuple[Diagnostic, ...]:
    return check_file(path).diagnostics


def test_paths_begin_where_they_are_written(base: Path, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    deep = write(tmp_path / "a/deep.plan.toml", 'extends = ["../common/base.plan.toml"]\n')
    mine = load_plan(write(tmp_path / "b/my.plan.toml", 'extends = ["../a/deep.plan.toml"]\n'))
    assert mine.plan.device == "../a/../common/phone.device.toml"
    assert mine.store_path.resolve() == (base.parent / "store").resolve()
    shown = write(tmp_path / "b/shown.plan.toml", "")
    shown.write_text(write_plan(mine))
    assert load_plan(shown).digest == mine.digest
    assert deep.exists()


class Lock:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, reference: str, kind: Kind) -> Located | None:
        if not has_scheme(reference):
            return None
        name = reference.removeprefix("lock:")
        if not (self.folder / name).exists():
            raise UserError.of("P015", f"{reference} is not locked")
        path = self.folder / name
        return Located(path=path, file_name=name, name=reference, reference=reference)

    def join(self, reference: str, relative: str) -> str:
        return f"lock:{relative.removeprefix('./')}"


def test_references_with_a_scheme_are_found_by_a_resolver(base: Path) -> None:
    lock = Lock(base.parent)
    path = write(base.parents[1] / "my.plan.toml", 'extends = ["lock:base.plan.toml"]\n')
    assert load_plan(path, resolver=lock).plan.device == "lock:phone.device.toml"
    path = write(base.parents[1] / "my.plan.toml", 'extends = ["lock:gone.plan.toml"]\n')
    (finding,) = check_file(path, resolver=lock).diagnostics
    assert (finding.code, finding.message) == ("P015", "lock:gone.plan.toml is not locked")
    assert finding.span is not None and (finding.span.line, finding.span.column) == (2, 12)
    assert [item.code for item in find(path)] == ["P020"]


BROKEN = ROOT / "tests/plans/broken"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, tmp_path)
    for number in range(5):
        shutil.copy(PARTS / "base.plan.toml", tmp_path / f"{number}.plan.toml")
    return tmp_path


def test_the_same_is_found_with_and_without() -> None:
    reuse = Reuse()
    paths = [*list_documents([BROKEN]), *list_documents([ROOT / "plans"])][::3]
    assert len(paths) > 50
    for path in paths:
        alone, together = check_file(path), check_file(path, reuse=reuse)
        assert together.diagnostics == alone.diagnostics, path
        assert together.sources == alone.sources and together.document == alone.document
        assert (together.resolved is None) == (alone.resolved is None)
        if together.resolved is not None and alone.resolved is not None:
            assert together.resolved.digest == alone.resolved.digest


def test_devices_and_models_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = read_source

    def count(path: Path, name: str) -> object:
        read.append(path.name)
        return original(path, name)

    monkeypatch.setattr(references, "read_source", count)
    reuse = Reuse()
    for path in sorted(folder.glob("*.plan.toml")):
        assert check_file(path, reuse=reuse).is_sound
    assert read.count("phone.device.toml") == read.count("small.model.toml") == 1
    assert len(read) == 8


def test_a_file_that_changes_is_read_again(folder: Path) -> None:
    reuse, device = Reuse(), folder / "phone.device.toml"
    assert check_file(folder / "0.plan.toml", reuse=reuse).is_sound
    device.write_text(device.read_text().replace("cores = 3", "cores = 0 "))
    os.utime(device, ns=(1, 1))
    found = check_file(folder / "1.plan.toml", reuse=reuse).diagnostics
    assert [item.code for item in found] == ["P104"]
