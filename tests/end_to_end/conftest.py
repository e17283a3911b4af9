"""A user, a repository of devices and a web server for the tests of sharing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sharing import Repository, Server, make_repository, start_server
from tests.helpers.sharing_user import User


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
