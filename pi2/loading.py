"""Models and plans by name: paths, pulled or converted models, shipped documents, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.caches import is_gguf
from pi2.diagnostics import UserError
from pi2.found_models import find_found, list_found
from pi2.plan.documents.quantities import parse_size
from pi2.plan.reading.references import list_shipped
from pi2.plan.toml.source import Kind
from pi2.progress import Progress, ignore_progress
from pi2.pulled_models import FILE, PLAN, RECORD, PulledModel, Source, find_model, list_models
from pi2.weights.file_reading import HUB, FileFiller

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel
    from pi2.engine.opening import MakeObserver
    from pi2.plan.reading.thresholds import GivenThresholds

MANIFEST = "manifest.json"


def is_checkpoint(path: Path) -> bool:
    """Whether a name means a checkpoint: a GGUF file, or a folder with a configuration."""
    try:
        if path.is_dir():
            return (path / "config.json").is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
    return is_gguf(path)


def find_plan(
    path: Path,
    kinds: Sequence[Kind] = ("plan",),
    *,
    files: FileFiller | None = None,
    progress: Progress = ignore_progress,
) -> Path:
    """The plan, or document of ``kinds``, that ``path`` names; a folder stays one.  A checkpoint is
    converted once, but not a GGUF file that runs as it is.  UserError P001 for an unknown name."""
    if is_checkpoint(path):
        is_run = (files or FileFiller()).runs_as_it_is(path)
        if is_run:
            return path
        from pi2.model_folders import convert_once

        return convert_once(path, progress=progress)
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
    found = [model.name for model in list_found()]
    return [*(model.name for model in list_models()), *found, *list_shipped("plan")]


def _find_plan(path: Path) -> Path | None:
    """The plan that a name or a model's folder means; None for another path."""
    if any((path / name).is_file() for name in (MANIFEST, FILE, RECORD)):
        return path / PLAN
    if path.exists() and not path.is_dir():
        return None
    name = str(path)
    if name.startswith(HUB) and find_found(name) is None:
        pulled = find_pulled(name)
        if pulled is None:
            raise UserError.of(
                "P001",
                f"{name} was not pulled to this machine",
                help=f"fetch it: `pi2 pull {name}`",
            )
        return pulled.plan
    if (found := find_found(name)) is not None:
        return found.plan
    model = find_model(name)
    return list_shipped("plan").get(name) if model is None else model.plan


def find_pulled(reference: str) -> PulledModel | None:
    """The model that was pulled from a place of the hub."""
    from pi2.importing.hub import parse_reference

    wanted = parse_reference(reference)
    for model in list_models():
        source = model.source
        if isinstance(source, Source) and source.repository == wanted.repository:
            own = wanted.file in (None, source.file)
            if own and (
                "@" not in reference or wanted.revision in (source.revision, source.commit)
            ):
                return model
    return None


def _report_unknown(path: Path) -> UserError:
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


def load(
    path: str | Path,
    *,
    set: Mapping[str, object] | None = None,
    locked: bool = False,
    memory: str | None = None,
    progress: Progress | None = None,
    make_observer: MakeObserver | None = None,
    thresholds: GivenThresholds = None,
) -> LoadedModel:
    """Load a model: of the plan at ``path``, or of another source that `pi2 run` takes.

    These are a GGUF file, which runs as it is or is converted once; a checkpoint's folder, which is
    converted once; the folder of a neuron store; the name of a pulled or converted model, or of a
    plan that comes with pi2.

    ``set`` replaces values of the plan, such as ``{"decode.predictor": "gate"}``. ``locked``
    refuses references whose source on this machine differs from ``pi2.lock``. ``memory``, such as
    ``"3 GiB"``, is another budget, to which the segments are fitted. ``progress`` is called with a
    label and the share done during long work. ``make_observer`` may give an observer of the
    executor. ``thresholds`` replace the plan's; ``"none"`` states that there are none yet. Raises
    `UserError` with all findings."""
    from pi2 import orchestrator
    from pi2.refit import read_plan

    plan, files = Path(path), FileFiller()
    if not plan.name.endswith(".plan.toml") and not files.runs_as_it_is(plan):
        plan = find_plan(plan, files=files, progress=progress or ignore_progress)
    fitted = read_plan(
        plan,
        overrides=set,
        memory_bytes=None if memory is None else parse_size(memory),
        locked=locked,
        thresholds=thresholds,
        files=files,
    )
    return orchestrator.load(fitted, progress=progress, make_observer=make_observer)
