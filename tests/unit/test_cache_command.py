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
from pi2.pulled_models import KINDS, RECORD, LocalSource, Source, find_models_folder
from pi2.sharing.fetching import read_settings
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table

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


def test_an_empty_cache_is_no_fault(tmp_path: Path, monkeypatch: Patch, ask: Ask) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "none"))
    assert run(["cache"]) == 0
    assert "0.0 MiB were removed" in ask(["cache", "clear"]).err
    assert not (tmp_path / "none").exists()


@in_table
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
