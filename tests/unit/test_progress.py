"""What somebody sees who waits: a bar on a terminal, one line elsewhere, nothing for a second."""

from __future__ import annotations

import pytest

from pi2.cli.commands import ProgressBar


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("pi2.cli.commands.time.monotonic", found)
    return found


def test_a_pipe_gets_one_line_of_what_takes_long(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar() as bar:
        bar("compiling kernels", 0.0)
        assert capsys.readouterr().err == ""
        clock.now = 2.0
        for share in (0.1, 0.5, 1.0):
            bar("compiling kernels", share)
        bar("loading neurons", 0.5)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "compiling kernels...\n")


def test_a_pipe_gets_nothing_of_what_is_quick_or_done(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar() as bar:
        bar("compiling kernels", 0.9)
        clock.now = 2.0
        bar("compiling kernels", 1.0)
    assert capsys.readouterr().err == ""
