"""Publishing a device: check it, take out what is private, write it into a clone."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tomli

from pi2.caches import find_home
from pi2.diagnostics import UserError
from pi2.plan.checking.check import check_file
from pi2.plan.checking.privacy import find_private, strip_private
from pi2.plan.documents.device import Device
from pi2.plan.toml.source import detect_kind, display_path, read_source
from pi2.sharing.cache import read_regular
from pi2.sharing.files import hash_bytes, write_atomically

FOLDER = "devices"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A device that is ready for others."""

    id: str
    data: bytes
    sha256: str
    stripped: tuple[str, ...]
    """What was taken out, in words that do not give it away."""

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"{self.id}.device.toml"


@dataclass(frozen=True, kw_only=True)
class Written:
    """Path of a prepared device, and what is left to do."""

    path: Path
    next_steps: tuple[str, ...]


def prepare_profile(path: Path) -> Prepared:
    """Check the device at ``path`` and take out what is private, in comments too.

    Raises `UserError` with the findings of a device that has errors, P740 where the text does not
    survive, P743 for other documents and for those that need files beside them.
    """
    name = display_path(path)
    if detect_kind(path.name) != "device":
        raise UserError.of(
            "P743", "only devices are published", file=name, help="its name ends in .device.toml"
        )
    report = check_file(path, name=name)
    if not report.is_sound or not isinstance(report.document, Device):
        raise UserError(report.diagnostics, sources=report.sources)
    source = read_source(path, name)
    assert not isinstance(source, list), name
    _check_alone(source.values, name)
    text, found = strip_private(source.text)
    home = str(find_home(os.environ))
    at_home = len(home) > 1 and home in text
    if at_home:
        text = text.replace(home, "~")
    text = _drop_local_schema(text)
    if find_private(text) or not _is_same_document(path, name, text, source.values):
        raise UserError.of(
            "P740",
            "what is private in it cannot be taken out by a program",
            file=name,
            help="take it out by hand: `pi2 validate` shows where it is",
        )
    data = text.encode("utf-8")
    lines = source.text.split("\n")
    stripped = []
    for item in found:
        line = source.text.count("\n", 0, item.start) + 1
        assert line <= len(lines)
        stripped.append(f"{name}:{line}: {_WORDS[item.kind]} {item.shortened}")
    if at_home:
        stripped.append(f"{name}: your home folder")
    return Prepared(
        id=report.document.id, data=data, sha256=hash_bytes(data), stripped=tuple(stripped)
    )


_WORDS = {"serial": "serial number", "account": "account", "home": "home folder"}


def _check_alone(values: dict[str, object], name: str) -> None:
    extends = values.get("extends")
    for item in extends if isinstance(extends, list) else [extends]:
        if isinstance(item, str) and (item.endswith(".toml") and ":" not in item):
            raise UserError.of(
                "P743",
                f"it needs `{item}`, which others do not have",
                file=name,
                help="publish that first and name it by its reference, or take over its tables",
            )


def _is_same_document(path: Path, name: str, text: str, values: dict[str, object]) -> bool:
    """Whether ``text`` is still sound, and differs from the document in texts only."""
    if not check_file(path, name=name, text=text).is_sound:
        return False
    return _list_keys(tomli.loads(text)) == _list_keys(values)


def _drop_local_schema(text: str) -> str:
    """Without a first line that names a schema by a path of this machine."""
    first, newline, rest = text.partition("\n")
    if first.startswith("#:schema ") and "://" not in first:
        return rest
    return first + newline + rest


def _list_keys(values: object) -> object:
    """The shape of a document: its keys, without the texts."""
    if isinstance(values, dict):
        return {key: _list_keys(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_list_keys(value) for value in values]
    return None if isinstance(values, str) else values


def write_profile(
    prepared: Prepared, clone: Path, *, replace: bool = False, commit: bool = False
) -> Written:
    """Write a prepared device into ``clone``, a work tree of git.

    With ``commit``, the file is committed on a new branch ``profile-ID``.  Raises `UserError` P741
    (another profile has the name) and P742 (no clone, or git refuses).
    """
    if not (clone / ".git").exists():
        raise UserError.of(
            "P742",
            "is not a clone of a git repository",
            file=str(clone),
            help="clone the repository that you want to publish in, and name that folder",
        )
    folder = clone / FOLDER
    if folder.is_symlink():
        raise UserError.of("P724", "is a symbolic link", file=str(folder))
    path = folder / prepared.file_name
    if os.path.lexists(path) and not replace:
        if read_regular(path) != prepared.data:
            raise UserError.of(
                "P741",
                "another profile has this name",
                file=str(path),
                help="choose another id, or give --force to propose a new version",
            )
    branch = f"profile-{prepared.id}"
    if commit:
        run_git(clone, "checkout", "--quiet", "-B", branch)
    if path.is_symlink():
        path.unlink()
    write_atomically(path, prepared.data)
    relative = f"{FOLDER}/{prepared.file_name}"
    place = shlex.quote(str(clone))
    if not commit:
        steps: tuple[str, ...] = (
            f"git -C {place} checkout -b {branch}",
            f"git -C {place} add {relative} && git -C {place} commit -m 'Describe {prepared.id}'",
            f"git -C {place} push origin {branch}, and open a pull request",
        )
        return Written(path=path, next_steps=steps)
    run_git(clone, "add", "--", relative)
    if run_git(clone, "status", "--porcelain", "--", relative):
        message = f"Describe {prepared.id}\n\nsha256 {prepared.sha256}\n"
        run_git(clone, "commit", "--quiet", "-m", message, "--", relative)
    steps = (f"git -C {place} push origin {branch}, and open a pull request",)
    return Written(path=path, next_steps=steps)


def run_git(clone: Path, *arguments: str) -> str:
    """Run git in the user's own clone, with the user's own configuration; P728 or P742."""
    program = shutil.which("git")
    if program is None:
        raise UserError.of("P728", "git is not installed", help="install git, then try again")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_DIR")}
    done = subprocess.run(
        [program, *arguments],
        cwd=clone,
        env={**environment, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
        raise UserError.of(
            "P742",
            f"git {arguments[0]} failed in the clone",
            file=str(clone),
            notes=[f"git: {line[:200]}" for line in said[:3]],
        )
    return done.stdout
