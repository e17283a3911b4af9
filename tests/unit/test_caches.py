"""One folder for everything that pi2 can make or fetch again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pi2.caches import find_cache_folder
from pi2.sharing.settings import read_settings


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
