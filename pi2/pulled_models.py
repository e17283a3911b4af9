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

from pi2.caches import VARIABLE
from pi2.diagnostics import UserError

PLAN = "default.plan.toml"
RECORD = "source.json"
"""A store's file that says what it was made from."""
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_LEAVING = ".leaving-"
"""Begins the name of a model that is being removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a store was made from."""

    repository: str
    """``ORG/NAME``."""
    revision: str
    """What was asked for: a branch, a tag or a commit."""
    commit: str
    quantization: Literal["int4", "int8", "fp16"] | None

    def write(self) -> bytes:
        """The record's text."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model of the folder."""

    name: str
    folder: Path
    source: Source

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
    return Path(os.path.expanduser("~/.local/share")) / "pi2" / "models"


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
        source = Source(**json.loads((folder / RECORD).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return PulledModel(name=name, folder=folder, source=source)


def remove_model(name: str) -> PulledModel:
    """Delete the pulled model ``name``, and what an interrupted removal has left.

    `UserError` P766 if there is none, or if it cannot be deleted.
    """
    model = find_model(name)
    if model is None:
        known = ", ".join(item.name for item in list_models()) or "none"
        raise UserError.of("P766", f"there is no pulled model {name!r}", help=f"known are: {known}")
    leaving = model.folder.with_name(f"{_LEAVING}{name}")
    try:
        if leaving.exists():
            shutil.rmtree(leaving)
        model.folder.rename(leaving)  # a model is there as a whole, or not at all
        shutil.rmtree(leaving)
    except OSError as error:
        raise UserError.of("P766", f"cannot remove {model.folder}: {error.strerror}") from None
    return model
