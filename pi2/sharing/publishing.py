"""A device for others: checked, and without private texts."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import tomli

from pi2.caches import find_home
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.plan.documents.device import Device
from pi2.plan.documents.private import find_private, strip_private
from pi2.plan.toml.source import detect_kind, display_path, read_source
from pi2.sharing.fetching import hash_bytes, read_regular, write_atomically

FOLDER = "devices"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A device that is ready for others."""

    id: str
    data: bytes
    sha256: str
    stripped: tuple[str, ...]
    """The removed parts, in words that do not give them away."""

    @property
    def file_name(self) -> str:
        return f"{self.id}.device.toml"


@dataclass(frozen=True, kw_only=True)
class Written:
    """Path of a prepared device, and the next steps."""

    path: Path
    next_steps: tuple[str, ...]


def prepare_profile(path: Path) -> Prepared:
    """Check the device and remove private texts; UserError with its findings, P740 or P743."""
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
    is_kept = check_file(path, name=name, text=text).is_sound and (
        _list_keys(tomli.loads(text)) == _list_keys(source.values)  # only texts have changed
    )
    if find_private(text) or not is_kept:
        raise UserError.of(
            "P740",
            "its private parts cannot be removed by a program",
            file=name,
            help="take it out by hand: `pi2 validate` shows where it is",
        )
    data = text.encode("utf-8")
    stripped = []
    for item in found:
        line = source.text.count("\n", 0, item.start) + 1
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


def _drop_local_schema(text: str) -> str:
    first, newline, rest = text.partition("\n")
    if first.startswith("#:schema ") and "://" not in first:
        return rest
    return first + newline + rest


def _list_keys(values: object) -> object:
    if isinstance(values, dict):
        return {key: _list_keys(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_list_keys(value) for value in values]
    return None if isinstance(values, str) else values


def write_profile(prepared: Prepared, clone: Path, *, replace: bool = False) -> Written:
    """Write a device into a clone of a git repository; UserError P741, P742."""
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
    if os.path.lexists(path) and not replace and read_regular(path) != prepared.data:
        raise UserError.of(
            "P741",
            "another profile has this name",
            file=str(path),
            help="choose another id, or give --force to propose a new version",
        )
    if path.is_symlink():
        path.unlink()
    write_atomically(path, prepared.data)
    branch, place = f"profile-{prepared.id}", shlex.quote(str(clone))
    relative = f"{FOLDER}/{prepared.file_name}"
    steps = (
        f"git -C {place} checkout -b {branch}",
        f"git -C {place} add {relative} && git -C {place} commit -m 'Describe {prepared.id}'",
        f"git -C {place} push origin {branch}, and open a pull request",
    )
    return Written(path=path, next_steps=steps)
