"""Files that cannot be read, or are no documents, get a finding of their own."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pi2.diagnostics import Diagnostic
from pi2.fitting.check import check_file
from pi2.plan.toml.source import MAX_BYTES, SourceFile, display_path, read_source

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
