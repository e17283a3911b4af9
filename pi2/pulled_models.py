"""The folder of pulled models: a neuron store each, with a record of what it was made from.

They lie in ``models`` of the folder that ``PI2_CACHE_DIR`` names; without, in ``pi2/models`` of the
folder that ``XDG_DATA_HOME`` names, as a rule ``~/.local/share``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pi2.caches import VARIABLE, find_home
from pi2.diagnostics import UserError

PLAN = "default.plan.toml"
RECORD = "source.json"
"""A store's file that says what it was made from."""
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_LEAVING = ".leaving-"
"""Begins the name of a model that is being removed."""


Precision = Literal["int4", "int8", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a store was made from: a commit of a repository."""

    repository: str
    """``ORG/NAME``."""
    revision: str
    """What was asked for: a branch, a tag or a commit."""
    commit: str
    quantization: Precision | None
    file: str | None = None
    """The one of several GGUF models."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"{self.repository}@{self.commit[:12]}" + (f" {self.file}" if self.file else "")

    def write(self) -> bytes:
        """The record's text."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSource:
    """What a store was made from: a checkpoint on this machine."""

    path: str
    """The file or folder, absolute."""
    files: tuple[tuple[str, int, int], ...]
    """Name, bytes and time of change (ns) of each file, which differ if it is another one."""
    quantization: Precision | None = None
    tokenizer: str | None = None
    """The file of a tokenizer that was given, absolute."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        return self.path

    @classmethod
    def describe(cls, path: Path, tokenizer: Path | None = None) -> LocalSource:
        """The checkpoint at ``path`` as it is now, with the file of another ``tokenizer``; parts of
        a split GGUF model count."""
        place = path.resolve()
        split = re.fullmatch(r"(.+-)\d{5}(-of-\d{5}\.gguf)", place.name, re.IGNORECASE)
        files = [place]
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.is_file())
        elif split is not None:
            parts = re.compile(re.escape(split[1]) + r"\d{5}" + re.escape(split[2]))
            files = sorted(file for file in place.parent.iterdir() if parts.fullmatch(file.name))
            place = files[0]
        if tokenizer is not None:
            tokenizer = tokenizer.resolve()
            files.append(tokenizer)
        stats = [(file.name, file.stat()) for file in files]
        described = ((name, found.st_size, found.st_mtime_ns) for name, found in stats)
        given = None if tokenizer is None else str(tokenizer)
        return cls(path=str(place), files=tuple(described), tokenizer=given)

    def write(self) -> bytes:
        """The record's text."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def _read_source(content: bytes) -> Source | LocalSource:
    """What a record says; ValueError, TypeError or KeyError if it is none."""
    fields = json.loads(content)
    if "path" not in fields:
        return Source(**fields)
    files = tuple((str(name), int(size), int(at)) for name, size, at in fields.pop("files"))
    return LocalSource(**fields, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model of the folder."""

    name: str
    folder: Path
    source: Source | LocalSource

    @property
    def plan(self) -> Path:
        """The plan that was made for this machine; there may be none."""
        return self.folder / PLAN

    def measure_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def find_models_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder, absolute; it may not exist yet."""
    values = os.environ if environment is None else environment
    own = values.get(VARIABLE)
    if own:
        return Path(own).absolute() / "models"
    common = values.get("XDG_DATA_HOME")
    if common and Path(common).is_absolute():
        return Path(common) / "pi2" / "models"
    return find_home(values) / ".local/share/pi2/models"


def list_models() -> list[PulledModel]:
    """All pulled models, in order of their names."""
    folder = find_models_folder()
    if not folder.is_dir():
        return []
    found = (find_model(path.name) for path in sorted(folder.iterdir()))
    return [model for model in found if model is not None]


def find_model(name: str) -> PulledModel | None:
    """The pulled model ``name``; None if there is none."""
    if not NAME.fullmatch(name):
        return None
    folder = find_models_folder() / name
    try:
        source = _read_source((folder / RECORD).read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return PulledModel(name=name, folder=folder, source=source)


def remove_model(name: str) -> Path:
    """Delete the model ``name``, and what an interrupted removal or conversion has left; returns
    its folder.

    `UserError` P766 if there is none, or if it cannot be deleted.
    """
    model = find_model(name)
    folder = find_models_folder() / name
    partial = folder.with_name(f".{name}.partial")
    leaving = folder.with_name(f"{_LEAVING}{name}")
    is_begun = NAME.fullmatch(name) is not None and partial.is_dir()
    if model is None and not is_begun:
        known = ", ".join(item.name for item in list_models()) or "none"
        raise UserError.of(
            "P766", f"no model {name!r} was pulled or converted", help=f"known are: {known}"
        )
    try:
        for left in (leaving, partial):
            if left.exists():
                shutil.rmtree(left)
        if model is not None:
            folder.rename(leaving)  # a model is there as a whole, or not at all
            shutil.rmtree(leaving)
    except OSError as error:
        raise UserError.of("P766", f"cannot remove {folder}: {error.strerror}") from None
    return folder
