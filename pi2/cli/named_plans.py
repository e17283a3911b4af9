"""Plans by name, as commands take them: missing models are offered on a terminal."""

from collections.abc import Sequence
from pathlib import Path

import click

from pi2.cli.commands import ProgressBar, is_guided
from pi2.found_models import find_found
from pi2.loading import find_plan, find_pulled, is_checkpoint
from pi2.plan.toml.source import KINDS, Kind
from pi2.weights.file_reading import HUB, FileFiller


def find_plan_path(path: Path, *, files: FileFiller | None = None) -> Path:
    """`find_plan` with a progress bar; missing weights of the hub are offered on a terminal."""
    found = _find(path, ("plan",), files)
    if is_guided():
        from pi2.cli.models import pull_weights
        from pi2.weights.file_reading import list_missing

        for weights in list_missing(found):
            if click.confirm(f"{weights} is not on this machine: fetch it?", err=True):
                pull_weights(found)
    return found


def find_document_path(path: Path, *, files: FileFiller | None = None) -> Path:
    """The plan, device or model that ``path`` names; a folder stays one."""
    return _find(path, KINDS, files)


def find_retokenized(
    path: Path, tokenizer: Path | None, *, files: FileFiller | None = None
) -> tuple[Path, dict[str, object]]:
    """The named plan with ``tokenizer``, and its overrides; UsageError without a checkpoint."""
    if tokenizer is None:
        return find_plan_path(path, files=files), {}
    if not is_checkpoint(path):
        raise click.UsageError(f"--tokenizer is for a checkpoint; {path} has its tokenizer")
    if (files or FileFiller()).runs_as_it_is(path):
        return path, {"tokenizer": str(tokenizer.absolute())}
    with ProgressBar() as progress:
        from pi2.model_folders import convert_once

        return convert_once(path, tokenizer, progress), {}


def _find(path: Path, kinds: Sequence[Kind], files: FileFiller | None = None) -> Path:
    name = str(path)
    is_missing = name.startswith(HUB) and find_pulled(name) is None and find_found(name) is None
    if is_missing and is_guided():
        from pi2.model_folders import fetch_model

        question = f"{name} is not on this machine: fetch and convert it?"
        if click.confirm(question, default=True, err=True):
            with ProgressBar() as progress:
                return fetch_model(name, progress=progress).plan
    with ProgressBar() as progress:
        return find_plan(path, kinds, files=files, progress=progress)
