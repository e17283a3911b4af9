"""A user of shared devices, at a command line of their own."""

import os
from pathlib import Path

import pytest
import tomli

from pi2.cli.main import run
from tests.helpers.sharing import Repository

NAME = "acme-12.device.toml"


class User:
    """Somebody at a command line of their own: folder, home and cache."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder / "project"
        self.cache = folder / "cache" / "profiles"
        self.folder.mkdir(parents=True)
        self._home = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.variables: dict[str, str] = {}

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run ``pi2``: exit code, standard output, standard error."""
        values = {
            "HOME": str(self._home),
            "XDG_CACHE_HOME": "",
            "PI2_CACHE_DIR": str(self.cache.parent),
            "PI2_GITHUB": "",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_AUTHOR_NAME": "User",
            "GIT_AUTHOR_EMAIL": "user@example.com",
            "GIT_COMMITTER_NAME": "User",
            "GIT_COMMITTER_EMAIL": "user@example.com",
            **self.variables,
        }
        for name, value in values.items():
            self._monkeypatch.setenv(name, value)
        self._monkeypatch.chdir(self.folder)
        self._capsys.readouterr()
        code = run(list(arguments))
        out, err = self._capsys.readouterr()
        return code, out, err

    def succeed(self, *arguments: str) -> str:
        code, out, err = self.run(*arguments)
        assert code == 0, (arguments, out, err)
        return out

    def fail(self, *arguments: str) -> list[str]:
        """Codes of the findings that a command ends with."""
        code, _, err = self.run(*arguments)
        assert code in (1, 2), (arguments, code, err)
        return [line[6:10] for line in err.splitlines() if line.startswith("error[")]

    def read_lock(self) -> list[dict[str, object]]:
        values = tomli.loads((self.folder / "pi2.lock").read_text("utf-8"))
        sources: list[dict[str, object]] = values["sources"]
        return sources


def refer(tap: Repository, revision: str = "v1", path: str = f"devices/{NAME}") -> str:
    return f"git+file://{tap.folder}//{path}@{revision}"
