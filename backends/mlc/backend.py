"""MLC-LLM as a backend: a GPU has the whole model and gives text; the plan's ``weights`` are its
folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.plan.arithmetic.units import Need, UnitFacts
from pi2.plan.documents.device import Unit, UnitKind
from pi2.plan.documents.model import Model

if TYPE_CHECKING:
    from pathlib import Path

    from pi2.backends.units import TextModel, TextRequest

COMPUTES = True
NATIVE = False
KINDS: tuple[UnitKind, ...] = ()
ONLY_EMULATED = False
WEIGHTS = "mlc-chat-config.json"
"""The file by which its folders are known."""


def find_obstacles(features: frozenset[str], architecture: str) -> list[str]:
    """Return why MLC-LLM cannot be started here; it is looked for in its own Python."""
    from pi2.backends.mlc.engine import find_missing

    missing = find_missing()
    return [] if missing is None else [missing]


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return nothing: MLC-LLM looks for the GPU itself, when it starts."""
    return []


def find_limits(facts: UnitFacts) -> list[str]:
    plan, model = facts.resolved.plan, facts.resolved.model
    limits = []
    if facts.resolved.dense_units:
        limits.append("has a whole model alone, and no unit beside it")
    if model.moe is not None:
        limits.append("computes no mixtures")
    if plan.decode.predictor != "none":
        limits.append('computes every neuron: decode.predictor must be "none"')
    if plan.decode.batch > 1:
        limits.append("computes one sequence at a time: decode.batch must be 1")
    return limits


def need_unit_memory(facts: UnitFacts) -> Need:
    """Return 0: MLC-LLM takes what it needs of the GPU's memory, and no budget holds it."""
    return Need(0, "nothing that a budget holds: MLC-LLM's memory is its own")


def check_weights(folder: Path, model: Model) -> None:
    """Compare the sizes that the folder states with the model's; UserError P689."""
    from pi2.backends.mlc.engine import check_folder

    check_folder(folder, model)


def open_text(request: TextRequest) -> TextModel:
    """Start MLC-LLM; UserError P686, P688 and P689."""
    from pi2.backends.mlc.engine import MlcEngine

    device = None if request.unit is None else request.unit.architecture
    return MlcEngine(
        request.folder,
        request.model,
        context=request.context,
        chunk=request.chunk,
        device=device or "auto",
    )
