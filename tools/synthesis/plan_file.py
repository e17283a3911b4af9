"""A plan for a synthetic store on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import Needs, count_runtime
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.quantities import approximate_bytes, format_bytes
from pi2.plan.weights.layout import BundleLayout

RUNTIME_BYTES = 192 * 2**20
"""Interpreter, libraries, tokenizer."""

_ROUND_BYTES = 2**20
_HOT_PART = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWish:
    """What a plan shall be like."""

    memory: float | int | None = None
    """Budget: a share of the bytes of the store (float), bytes (int), or whatever keeps
    everything in memory (None)."""
    predictor: str | None = None
    """``decode.predictor``; by default low-rank where the model has predictors, gate where its
    activation allows it, else none."""
    context: int | None = None
    """``kv.context``; by default 2048, or less if the model has less."""
    backend: str = "cpu"
    """Backend of the processor."""


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
    needs = _find_needs(document, model, device)
    budget = None
    if wish.memory is not None:
        share = isinstance(wish.memory, float)
        budget = int(wish.memory * store_bytes) if share else int(wish.memory)
        document["memory"]["embedding"] = "flash"
        _shrink(document, model, device, bundle, budget)
        needs = _find_needs(document, model, device)
    segments = {name: _round_up(need.bytes) for name, need in needs.items()}
    runtime = count_runtime(model, budget or sum(segments.values()), RUNTIME_BYTES)
    segments = {"runtime": runtime, **segments}
    if budget is not None:
        # Whatever is left caches cold neurons.
        rest = budget - sum(segments.values()) + segments["cold"]
        if rest < needs.cold.bytes:
            raise _too_small(budget, segments)
        segments["cold"] = min(rest, _count_absent(document, model) * bundle.stride)
    document["memory"] |= {
        "budget": format_bytes(budget or sum(segments.values())),
        "segments": {name: format_bytes(size) for name, size in segments.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomlkit.dumps(document), "utf-8")


def _draft(
    path: Path, model: Model, model_file: Path, store: Path, bundle: BundleLayout, wish: PlanWish
) -> dict[str, Any]:
    """The plan with everything resident and segments that are still to be filled in."""
    folder = path.resolve().parent
    default = "low-rank" if model.predictor is not None else "gate"
    if model.predictor is None and model.is_smooth:
        default = "none"
    names = ("runtime", "attention", "kv", "predictor", "hot", "cold", "workspace")
    return {
        "schema_version": 2,
        "name": f"{model.name or model.id}, random weights",
        "description": "Synthetic: for measuring speed and memory, the text means nothing.",
        "device": "host",
        "model": _relate(model_file, folder),
        "store": _relate(store, folder),
        "backends": {"cpu": wish.backend},
        "memory": {"budget": "1 B", "segments": dict.fromkeys(names, "1 B")},
        "bundle": {"stride": f"{bundle.stride} B"}
        | ({} if bundle.scales == "inline" else {"scales": bundle.scales}),
        "layers": {"split": {"cpu": 1.0}, "hot": 1.0},
        "decode": {"predictor": wish.predictor or default},
        "kv": {"context": wish.context or min(2048, model.shape.context)},
    }


def _relate(target: Path, folder: Path) -> str:
    """Path from ``folder``; never a bare name, which would be a shipped document."""
    relative = os.path.relpath(target.resolve(), folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _resolve(document: dict[str, Any], model: Model, device: Device) -> ResolvedPlan:
    plan = Plan.model_validate_json(json.dumps(document))
    return ResolvedPlan(plan=plan, device=device, model=model)


def _find_needs(document: dict[str, Any], model: Model, device: Device) -> Needs:
    return _resolve(document, model, device).needs


def _count_absent(document: dict[str, Any], model: Model) -> int:
    """Neurons that are not hot."""
    hot: int = round(document["layers"]["hot"] * model.layer_neurons)
    return model.shape.layers * (model.layer_neurons - hot)


def _shrink(
    document: dict[str, Any], model: Model, device: Device, bundle: BundleLayout, budget: int
) -> None:
    """Set ``layers.hot`` so that hot neurons take half of the room that ``budget`` leaves them."""
    document["layers"]["hot"] = 0.0
    needs = _find_needs(document, model, device)
    fixed = count_runtime(model, budget, RUNTIME_BYTES) + sum(
        _round_up(need.bytes) for name, need in needs.items() if name not in ("hot", "cold")
    )
    every = model.shape.layers * model.layer_neurons * bundle.stride
    share = (budget - fixed) / every
    if share >= 1.0:
        document["layers"]["hot"] = 1.0
    elif document["decode"]["predictor"] == "none":
        document["layers"]["hot"] = _round_down(share)
    else:
        document["layers"]["hot"] = _round_down(share * _HOT_PART)


def _round_up(size: int) -> int:
    """A readable size that is not smaller."""
    step = _ROUND_BYTES if size > 16 * _ROUND_BYTES else _ROUND_BYTES // 16
    return -(-size // step) * step


def _round_down(share: float) -> float:
    return max(0, int(share * 1000)) / 1000


def _too_small(budget: int, segments: dict[str, int]) -> UserError:
    need = sum(segments.values())
    parts = ", ".join(f"{name} {approximate_bytes(size)}" for name, size in segments.items())
    return UserError.of(
        "P552",
        f"{approximate_bytes(budget)} of memory is too little for this model: it needs "
        f"{approximate_bytes(need)} ({parts})",
        help="give it more with --memory, or a shorter --context",
    )
