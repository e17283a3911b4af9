"""Sessions at the command line; each file of tests/sessions is their specification."""

import os
from pathlib import Path

import pytest

from tests.helpers.compiling import use_own_data
from tests.helpers.sessions import SLOW, list_sessions, play, read_sessions


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(
            path,
            name,
            id=f"{path.stem}: {name.removesuffix(SLOW)}",
            marks=[pytest.mark.slow] * name.endswith(SLOW),
        )
        for path, name in list_sessions()
    ],
)
def test_commands_do_and_say_what_is_written(
    path: Path,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    use_own_data(tmp_path, monkeypatch)
    author = {"AUTHOR_NAME": "A", "AUTHOR_EMAIL": "a@b", "COMMITTER_NAME": "A"}
    author |= {"COMMITTER_EMAIL": "a@b", "CONFIG_GLOBAL": os.devnull}
    for variable, value in author.items():
        monkeypatch.setenv(f"GIT_{variable}", value)
    monkeypatch.chdir(folder)
    play(read_sessions(path)[name], folder, capsys)
