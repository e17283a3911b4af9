"""Kernels that are compiled quickly, and for the tests of sharing a user, a repository of devices
and a web server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sharing import Repository, Server, make_repository, start_server
from tests.helpers.sharing_user import User


@pytest.fixture(scope="module", autouse=True)
def quick(quick_kernels: None) -> None:
    """What runs ask of kernels does not depend on how well these are optimised: `test_demo.py` runs
    users' kernels."""


@pytest.fixture
def bob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> User:
    return User(tmp_path / "bob", monkeypatch, capsys)


@pytest.fixture
def tap(tmp_path: Path) -> Repository:
    return make_repository(tmp_path / "tap")


@pytest.fixture
def server() -> Iterator[Server]:
    with start_server() as running:
        yield running
