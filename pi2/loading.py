"""`pi2.load`: a model from anything that `pi2 run` takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pi2 import orchestrator
from pi2.plan.documents.quantities import parse_size
from pi2.progress import Progress, ignore_progress
from pi2.refit import read_plan
from pi2.weights.file_reading import FileFiller

if TYPE_CHECKING:
    from pi2.engine.assembly import MakeObserver
    from pi2.engine.loaded_model import LoadedModel
    from pi2.plan.reading.thresholds import GivenThresholds


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
    plan, files = Path(path), FileFiller()
    if not plan.name.endswith(".plan.toml") and not files.runs_as_it_is(plan):
        from pi2.named_plans import find_plan

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
