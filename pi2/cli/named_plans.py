"""Names of plans, for all commands: `pi2 run demo` means the plan of that name, wherever it is.

A name is a path, a pulled or converted model, a plan, device or model that comes with pi2, a
checkpoint, or a model of the hub that was pulled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.checkpoint_models import convert_once, is_checkpoint
from pi2.diagnostics import UserError
from pi2.plan.reading.references import list_shipped
from pi2.plan.toml.source import KINDS, Kind
from pi2.pulled_models import PLAN, Source, find_model, list_models
from pi2.weights.file_reading import runs_as_it_is

if TYPE_CHECKING:
    from pi2.pulled_models import PulledModel

MANIFEST = "manifest.json"
HUB = "hf:"


def find_plan_path(path: Path, *, has_files: bool = False) -> Path:
    """The plan that ``path`` names; a checkpoint is converted, once: `convert_once`.

    With ``has_files`` a GGUF file stands for the plan that runs it as it is, where that is
    possible.

    A store stands for the plan in it.  UserError P001 for a name that nothing has.
    """
    return _find(path, ("plan",), has_files)


def find_retokenized(
    path: Path, tokenizer: Path | None, *, has_files: bool = False
) -> tuple[Path, dict[str, object]]:
    """The plan that ``path`` names, with another ``tokenizer`` if one is given, and the values that
    this takes; click's UsageError for a plan that is no checkpoint."""
    if tokenizer is None:
        return find_plan_path(path, has_files=has_files), {}
    if not is_checkpoint(path):
        raise click.UsageError(f"--tokenizer is for a checkpoint; {path} has its tokenizer")
    if has_files and runs_as_it_is(path):
        return path, {"tokenizer": str(tokenizer.absolute())}
    return convert_once(path, tokenizer), {}


def find_document_path(path: Path) -> Path:
    """The plan, device or model that ``path`` names; a folder stays one."""
    return _find(path, KINDS, True)


def _find(path: Path, kinds: Sequence[Kind], has_files: bool) -> Path:
    if is_checkpoint(path):
        return path if has_files and runs_as_it_is(path) else convert_once(path)
    try:
        found = _find_plan(path)
        if found is not None or os.path.lexists(path):
            return found or path
        for kind in kinds:
            if (document := list_shipped(kind).get(str(path))) is not None:
                return document
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise _report_unknown(path)


def list_names() -> list[str]:
    """Names of the plans that `find_plan_path` knows."""
    return [*(model.name for model in list_models()), *list_shipped("plan")]


def _find_plan(path: Path) -> Path | None:
    """The plan that a name or a store means; None for another path."""
    if (path / MANIFEST).is_file():
        return path / PLAN
    if path.exists() and not path.is_dir():
        return None
    name = str(path)
    if name.startswith(HUB):
        return _find_pulled(name).plan
    model = find_model(name)
    return list_shipped("plan").get(name) if model is None else model.plan


def _find_pulled(reference: str) -> PulledModel:
    """The model that was pulled from a place of the hub; UserError P001 if none was."""
    from pi2.importing.hub import parse_reference

    wanted = parse_reference(reference)
    for model in list_models():
        source = model.source
        if isinstance(source, Source) and source.repository == wanted.repository:
            if "@" not in reference or wanted.revision in (source.revision, source.commit):
                return model
    if sys.stdin.isatty() and sys.stderr.isatty():
        question = f"{reference} is not on this machine: fetch and convert it?"
        if click.confirm(question, default=True, err=True):
            from pi2.cli.pull import fetch_model

            return fetch_model(reference)
    raise UserError.of(
        "P001",
        f"{reference} was not pulled to this machine",
        help=f"fetch it: `pi2 pull {reference}`",
    )


def _report_unknown(path: Path) -> UserError:
    """The error for a name that nothing has, with names that are near."""
    from difflib import get_close_matches

    name, known = str(path), list_names()
    near: list[str] = []
    if os.path.isdir(path.parent):
        files = {item.name: item for item in path.parent.iterdir() if item.suffix != ".part"}
        near = [str(files[item]) for item in get_close_matches(path.name, files, n=2, cutoff=0.7)]
    near += get_close_matches(name.removesuffix(".plan.toml"), known, n=3, cutoff=0.5)
    near += [item for item in known if item.rpartition("/")[2] == name and item not in near]
    parts = [f"did you mean {' or '.join(near)}?"] if near else []
    if not near and not path.suffix and path.name == name:
        shown = ", ".join(item for item in known if "/" not in item)
        parts.append(f"known are {shown}, and `pi2 doctor` lists all plans that come with pi2;")
    if len(path.parts) == 2 and not path.is_absolute() and not path.suffix.startswith(".toml"):
        parts.append(f"`pi2 pull {HUB}{name}` fetches a model of the hub;")
    parts.append("`pi2 list` shows the models that were pulled or converted")
    return UserError.of(
        "P001", "no file, plan or model has this name", file=name, help=" ".join(parts)
    )
