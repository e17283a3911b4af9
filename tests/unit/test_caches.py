"""One folder for everything that pi2 can make or fetch again."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import pytest

from pi2.caches import find_cache_folder, find_home, find_problem
from pi2.pulled_models import find_models_folder
from pi2.sharing.fetching import read_settings


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
    own: str | None, common: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
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


def test_a_relative_folder_is_meant_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    assert find_cache_folder("peers", {"PI2_CACHE_DIR": "kept"}) == Path("/usr/kept/peers")


@pytest.mark.parametrize("home", ["", "~", "here"])
def test_no_folder_is_made_where_a_command_happens_to_run(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_keeps_a_folder_from_being_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
