"""One folder for everything that pi2 can make or fetch again, and `pi2 cache`."""

import errno
import fcntl
import json
import os
import pwd
import time
from pathlib import Path
from typing import get_args

import pytest

from pi2.caches import Kept, find_cache_folder, find_home, find_problem
from pi2.cli.main import run
from pi2.pulled_models import KINDS, ONLY_NAMED, RECORD, LocalSource, Source, find_models_folder
from pi2.sharing.fetching import read_settings
from tests.helpers.programs import Ask

Patch = pytest.MonkeyPatch
DAY_S = 86400


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A cache with one thing of every kind, each used ten days ago."""
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    for kind in get_args(Kept):
        place = tmp_path / kind / ("blobs/digest" if kind == "profiles" else "")
        if kind in ("downloads", "prefixes"):
            place /= "one"
        place.mkdir(parents=True)
        (place / "thing").write_bytes(b"x" * 8192)
    pulled = Source(repository="a/b", revision="main", commit="0" * 40, quantization=None)
    for name, source in (("pulled", pulled), ("converted", LocalSource(path="/x.gguf", files=()))):
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


def test_every_kind_is_listed_with_size_and_last_use(folder: Path, ask: Ask) -> None:
    rows = ask(["cache"]).out.splitlines()
    assert [row.split()[0] for row in rows] == [*KINDS, "all"]
    assert all(" 1 " in row and "10 d ago" in row for row in rows[:-1])
    found = {item["kind"]: item for item in json.loads(ask(["cache", "--json"]).out)}
    assert found.keys() == KINDS.keys() and found["kernels"]["bytes"] == 8192
    assert str(folder / "peers/thing") in ask(["cache", "list", "peers"]).out


def test_models_and_what_was_typed_stay_unless_they_are_named(folder: Path) -> None:
    assert run(["cache", "clear"]) == 0
    assert list_files(folder) == {"history", "pulled", "converted"}
    assert run(["cache", "clear", "stores"]) == 0
    assert list_files(folder) == {"history", "pulled"}
    assert run(["cache", "clear", "models", "history"]) == 0
    assert list_files(folder) == set()


def test_nothing_goes_in_a_dry_run(folder: Path, ask: Ask) -> None:
    said = ask(["cache", "clear", "--dry-run"])
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


def test_download_that_is_under_way_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_an_empty_cache_is_no_fault(tmp_path: Path, monkeypatch: Patch, ask: Ask) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "none"))
    assert run(["cache"]) == 0
    assert "0.0 MiB were removed" in ask(["cache", "clear"]).err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("own", "common", "expected"),
    [
        ("/a", "/b", "/a/kernels"),
        (None, "/b", "/b/pi2/kernels"),
        (None, None, "/home/u/.cache/pi2/kernels"),
        ("", "relative", "/home/u/.cache/pi2/kernels"),
    ],
)
def test_the_folder_follows_the_platform(
    own: str | None, common: str | None, expected: str, monkeypatch: Patch
) -> None:
    for name, value in (("PI2_CACHE_DIR", own), ("XDG_CACHE_HOME", common)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/u")
    assert find_cache_folder("kernels") == Path(expected)


def test_one_variable_moves_profiles_too() -> None:
    assert read_settings({"PI2_CACHE_DIR": "/a"}).cache == Path("/a/profiles")


def test_a_relative_folder_is_meant_from_here(monkeypatch: Patch) -> None:
    monkeypatch.chdir("/usr")
    assert find_cache_folder("peers", {"PI2_CACHE_DIR": "kept"}) == Path("/usr/kept/peers")


@pytest.mark.parametrize("home", ["", "~", "here"])
def test_no_folder_is_made_where_a_command_happens_to_run(home: str, monkeypatch: Patch) -> None:
    """An account that is in no list, without a home that is one."""

    def find_nobody(number: int) -> pwd.struct_passwd:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", find_nobody)
    values = {"HOME": home}
    assert find_home(values) == Path("/nonexistent")
    assert find_cache_folder("kernels", values).is_absolute()
    assert find_models_folder(values).is_absolute()


def test_the_home_of_the_account_is_that_of_a_process_without_one() -> None:
    assert find_home({"HOME": "~"}) == Path(pwd.getpwuid(os.getuid()).pw_dir)


def test_what_keeps_folder_from_being_used(tmp_path: Path, monkeypatch: Patch) -> None:
    assert find_problem(tmp_path / "new", runs_code=True) is None
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert find_problem(tmp_path / "file/kernels", runs_code=True) == os.strerror(errno.ENOTDIR)
    assert find_problem(Path(os.fsdecode(bytes(tmp_path) + b"/\xff")), runs_code=False) is not None

    class Mounted:
        f_flag = os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda path: Mounted())
    assert "noexec" in str(find_problem(tmp_path, runs_code=True))
    assert find_problem(tmp_path, runs_code=False) is None
