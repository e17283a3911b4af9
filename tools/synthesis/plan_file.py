"""A plan for a synthetic store on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from pi2.diagnostics import UserError
from pi2.fitting.budget import Shortage, fit_plan, write_memory
from pi2.fitting.completion import choose_predictor
from pi2.fitting.sources import find_source
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import BundleLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWish:
    """What a plan shall be like."""

    memory: float | int | None = None
    """Budget: a share of the bytes of the store (float), bytes (int), or whatever keeps
    everything in memory (None)."""
    predictor: str | None = None
    """``decode.predictor``; by default low-rank where the model has predictors, router in another
    mixture, gate where the activation allows it, else none."""
    context: int | None = None
    """``kv.context``; by default 2048, or less if the model has less."""
    backend: str = "cpu"
    """Backend of the processor."""
    runtime_bytes: int | None = None
    """Size of the segment ``runtime``, where it is not the usual one."""


def write_plan(
    path: Path,
    *,
    model: Model,
    model_file: Path,
    device: Device,
    store: Path,
    bundle: BundleLayout,
    store_bytes: int,
    wish: PlanWish,
) -> None:
    """Write a plan for ``store`` (of ``store_bytes``) to ``path``.

    ``device`` is the shipped device "host".  Paths in the plan are relative to it.  Raises
    `UserError` P552 if the memory that is wished for is too small.
    """
    document = _draft(path, model, model_file, store, bundle, wish)
    budget = None
    if wish.memory is not None:
        share = isinstance(wish.memory, float)
        budget = int(wish.memory * store_bytes) if share else int(wish.memory)
        document["memory"]["embedding"] = "flash"
    plan = Plan.model_validate_json(json.dumps(document))
    resolved = ResolvedPlan(plan=plan, device=device, model=model, find_source=find_source)
    stated = {} if wish.runtime_bytes is None else {"runtime": wish.runtime_bytes}
    try:
        fitted = fit_plan(resolved, budget, stated=stated)
    except Shortage as shortage:
        assert budget is not None
        raise _explain_shortage(budget, shortage) from None
    document["memory"] |= write_memory(fitted.plan)
    document["layers"]["hot"] = fitted.plan.layers.hot
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomlkit.dumps(document), "utf-8")


def _draft(
    path: Path, model: Model, model_file: Path, store: Path, bundle: BundleLayout, wish: PlanWish
) -> dict[str, Any]:
    """The plan with everything resident and segments that are still to be filled in."""
    folder = path.resolve().parent
    names = ("runtime", "attention", "kv", "predictor", "hot", "cold", "workspace")
    return {
        "schema_version": 3,
        "name": f"{model.name or model.id}, random weights",
        "description": "Synthetic: for measuring speed and memory, the text means nothing.",
        "device": "host",
        "model": _relate(model_file, folder),
        "weights": _relate(store, folder),
        "backends": {"cpu": wish.backend},
        "memory": {"budget": "1 B", "segments": dict.fromkeys(names, "1 B")},
        "bundle": {"stride": f"{bundle.stride} B"}
        | ({} if bundle.scales == "inline" else {"scales": bundle.scales}),
        "layers": {"split": {"cpu": 1.0}, "hot": 1.0},
        "decode": {"predictor": wish.predictor or choose_predictor(model)},
        "kv": {"context": wish.context or min(2048, model.shape.context)},
    }


def _relate(target: Path, folder: Path) -> str:
    """Path from ``folder``; never a bare name, which would be a shipped document."""
    relative = os.path.relpath(target.resolve(), folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _explain_shortage(budget: int, shortage: Shortage) -> UserError:
    parts = ", ".join(f"{name} {approximate_bytes(size)}" for name, size in shortage.sizes.items())
    return UserError.of(
        "P552",
        f"{approximate_bytes(budget)} of memory is too little for this model: it needs "
        f"{approximate_bytes(shortage.needed_bytes)} ({parts})",
        help="give it more with --memory, or a shorter --context",
    )
