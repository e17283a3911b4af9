"""A profile in words: its origin, and every figure with its source."""

import difflib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from pi2.caches import find_home
from pi2.diagnostics import UserError
from pi2.diagnostics.texts import escape_controls
from pi2.fitting.check import check_file
from pi2.plan.documents.device import Device
from pi2.plan.documents.private import find_private, strip_private, walk_figures
from pi2.plan.reading.references import has_scheme, list_shipped
from pi2.plan.toml.source import detect_kind, display_path, parse_source, read_source
from pi2.plan.toml.text import format_path
from pi2.sharing.fetching import hash_bytes, read_regular, write_atomically
from pi2.sharing.lock import name_in_lock, require_copy
from pi2.sharing.project import Project
from pi2.sharing.references import parse_reference
from pi2.sharing.resolver import LockedReferences


@dataclass(frozen=True)
class Row:
    """A device of the catalogue."""

    reference: str
    """Reference that a plan writes."""
    name: str
    """Display name of the device."""
    description: str


def search_profiles(words: Sequence[str]) -> list[Row]:
    rows = [_describe(name, path) for name, path in list_shipped("device").items()]
    texts = [f"{row.reference} {row.name} {row.description}".casefold() for row in rows]
    wanted = [word.casefold() for word in words]
    found = zip(rows, texts, strict=True)
    return [row for row, text in found if all(word in text for word in wanted)]


def _describe(reference: str, path: Path) -> Row:
    source = parse_source(path, reference, path.read_text("utf-8"))
    assert not isinstance(source, list), source
    name, text = (" ".join(source.values.get(key, "").split()) for key in ("name", "description"))
    return Row(reference=reference, name=name, description=text[:200])


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


def write_profile(
    prepared: Prepared, clone: Path, *, replace: bool = False, commit: bool = False
) -> Written:
    """Write a device into a git clone, with ``commit`` on a new branch; UserError P741, P742."""
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


def describe_profile(project: Project, profile: str) -> dict[str, Any]:
    path, reference, origin = _find(project, profile)
    folder = path.parent if reference is None else project.folder
    resolver = LockedReferences(folder, settings=project.settings)
    report = check_file(path, name=profile, resolver=resolver, reference=reference)
    if report.document is None:
        raise UserError(report.diagnostics, sources=report.sources)
    document = report.document
    data = path.read_bytes()
    return {
        "profile": profile,
        "name": document.name,
        "description": " ".join(document.description.split()),
        "sha256": hash_bytes(data),
        "size_bytes": len(data),
        "file": display_path(path),
        **origin,
        "figures": [
            {"figure": format_path(place), **figure.model_dump(mode="json", exclude_none=True)}
            for place, figure in walk_figures(document)
        ],
        "findings": len(report.diagnostics),
    }


def _find(project: Project, profile: str) -> tuple[Path, str | None, dict[str, Any]]:
    lock = project.read_lock()
    source = None
    if has_scheme(profile):
        source = lock.find(name_in_lock(parse_reference(profile), project.folder, lock.folder))
    if source is not None:
        path = require_copy(source, project.cache)
        kept = {"url", "path", "revision", "revision_kind"}
        origin = source.model_dump(mode="json", include=kept, exclude_defaults=True)
        return path, source.reference, origin
    shipped = list_shipped("device")
    if profile in shipped:
        return shipped[profile], None, {"origin": "comes with pi2"}
    path = project.folder / profile
    if profile.endswith(".toml") and path.is_file():
        return path, None, {}
    known = [*shipped, *(source.reference for source in lock.sources)]
    near = difflib.get_close_matches(profile, known, n=1, cutoff=0.5)
    raise UserError.of(
        "P710",
        f"`{profile}` is neither locked nor shipped",
        help=f"did you mean {near[0]}?" if near else "`pi2 profile search` lists what there is",
    )


def write_description(found: dict[str, Any]) -> str:
    lines = [f"{found['profile']}: {found['name'] or '(no name)'}"]
    if found["description"]:
        lines.append(found["description"])
    lines.append("")
    for key in ("origin", "url", "path", "revision", "revision_kind", "file", "sha256"):
        if found.get(key):
            lines.append(f"{key.replace('_', ' '):13} {found[key]}")
    if found["figures"]:
        lines += ["", f"{len(found['figures'])} figures"]
    for item in found["figures"]:
        value = item.get("value") or item.get("rate") or f"{item.get('giga_ops')} GOP/s"
        tail = ""
        if "spread" in item:
            tail = f", spread {item['spread']:.1%} of {item.get('samples', '?')}"
        lines.append(f"  {item['figure']}: {value} ({item['status']}{tail}): {item['source']}")
    return "".join(f"{escape_controls(line)}\n" for line in lines)
