"""`pi2 cache`: what is on this machine, and what goes."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import get_args

import pytest

from pi2.caches import Kept
from pi2.cli.main import run
from pi2.pulled_models import KINDS, ONLY_NAMED, RECORD, LocalSource, Source

DAY_S = 86400


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one thing of every kind, each used ten days ago."""
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    for kind in get_args(Kept):
        place = tmp_path / kind / ("blobs/digest" if kind == "profiles" else "")
        if kind in ("downloads", "prefixes"):
            place /= "one"
        place.mkdir(parents=True)
        (place / "thing").write_bytes(b"x" * 8192)
    pulled = Source(repository="a/b", revision="main", commit="0" * 40, quantization=None)
    converted = LocalSource(path="/x.gguf", files=())
    for name, source in (("pulled", pulled), ("converted", converted)):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / RECORD).write_bytes(source.write())
        (tmp_path / "models" / name / "manifest.json").write_text("{}")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            os.utime(file, (time.time() - 10 * DAY_S,) * 2)
    return tmp_path


def list_files(folder: Path) -> set[str]:
    """Kinds of which something is left; models by their names."""
    return {
        file.parent.name if file.name == RECORD else file.relative_to(folder).parts[0]
        for file in folder.rglob("*")
        if file.is_file() and file.name != "manifest.json"
    }


ALL = {*get_args(Kept), "pulled", "converted"}


def test_every_kind_is_listed_with_size_and_last_use(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cache"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [*KINDS, "all"]
    assert all(" 1 " in row and "10 d ago" in row for row in rows[:-1])
    assert run(["cache", "--json"]) == 0
    found = {item["kind"]: item for item in json.loads(capsys.readouterr().out)}
    assert found.keys() == KINDS.keys()
    assert found["kernels"]["bytes"] == 8192
    assert run(["cache", "list", "peers"]) == 0
    assert str(folder / "peers/thing") in capsys.readouterr().out


def test_models_and_what_was_typed_stay_unless_they_are_named(folder: Path) -> None:
    assert run(["cache", "clear"]) == 0
    assert list_files(folder) == {"history", "pulled", "converted"}
    assert run(["cache", "clear", "stores"]) == 0
    assert list_files(folder) == {"history", "pulled"}
    assert run(["cache", "clear", "models", "history"]) == 0
    assert list_files(folder) == set()


def test_nothing_goes_in_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", "clear", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == len(KINDS) - len(ONLY_NAMED)
    assert "would be removed" in said.err
    assert list_files(folder) == ALL


@pytest.mark.parametrize(("age", "goes"), [("9d", True), ("11d", False), ("2w", False)])
def test_what_was_used_lately_stays(folder: Path, age: str, goes: bool) -> None:
    assert run(["cache", "clear", "kernels", "--older-than", age]) == 0
    assert ("kernels" in list_files(folder)) != goes


@pytest.mark.parametrize("arguments", [["kernel"], ["--older-than", "soon"]])
def test_what_is_no_kind_and_no_age_is_said(folder: Path, arguments: list[str]) -> None:
    assert run(["cache", "clear", *arguments]) == 2
    assert list_files(folder) == ALL


def test_a_download_that_is_under_way_stays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    descriptor = os.open(folder / "downloads/one", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert run(["cache", "clear", "downloads"]) == 0
    finally:
        os.close(descriptor)
    assert "downloads" in list_files(folder)
    assert "in use by another process" in capsys.readouterr().err
    assert run(["cache", "clear", "downloads"]) == 0
    assert "downloads" not in list_files(folder)


def test_kernels_that_are_being_compiled_stay(folder: Path) -> None:
    room = folder / "kernels/compiling-1"
    room.mkdir()
    (room / "new.so").write_text("")
    assert run(["cache", "clear", "kernels"]) == 0
    assert room.exists()
    os.utime(room, (0, 0))
    assert run(["cache", "clear", "kernels"]) == 0
    assert not room.exists()


def test_an_empty_cache_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "none"))
    assert run(["cache"]) == 0
    assert run(["cache", "clear"]) == 0
    assert "0.0 MiB were removed" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
