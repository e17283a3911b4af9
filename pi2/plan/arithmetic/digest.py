"""The digest of a resolved plan: what a run, a bench or a trace was configured by."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan

_COSMETIC = frozenset({"name", "description"})


def write_canonical_json(value: Any) -> str:
    """Sorted, compact, ASCII JSON; refuses what is no plain data."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def hash_json(value: Any) -> str:
    """SHA-256, hexadecimal, of the canonical JSON of ``value``."""
    return hashlib.sha256(write_canonical_json(value).encode("ascii")).hexdigest()


def dump_plain(document: BaseModel) -> dict[str, Any]:
    """All keys, defaults filled in, quantities as exact texts; names and descriptions left out."""
    values: dict[str, Any] = document.model_dump(mode="json")
    for unit in values.get("units", {}).values():
        # Devices without it have the digests that they had before there was such a key.
        if unit.get("emulated") is None:
            unit.pop("emulated", None)
    return {key: value for key, value in values.items() if key not in _COSMETIC}


def _dump_layer(layer: ResolvedLayer) -> dict[str, Any]:
    values: dict[str, Any] = {"split": dict(layer.split), "hot": layer.hot}
    if layer.dense is not None and len(set(layer.dense.by_sequences)) > 1:
        # Other splits for several sequences, which most plans do not have.
        values["batches"] = [layer.dense.unit, *layer.dense.by_sequences]
    return values


def compute_digest(resolved: ResolvedPlan) -> str:
    """Digest of plan, device and model together.

    Settings of layers count as resolved, so that two spellings of the same plan agree; where the
    device and model files lie does not count, their content does.
    """
    plan = dump_plain(resolved.plan)
    # What is kept between requests does not change what a run is.
    for key in ("device", "model", "layers", "serve"):
        del plan[key]
    # Plans without them have the digests that they had before there were such keys.
    if plan["memory"]["lock"] == "none":
        del plan["memory"]["lock"]
    if plan["decode"]["speculation"] is None:
        del plan["decode"]["speculation"]
    elif resolved.draft is not None:
        plan["decode"]["speculation"]["plan"] = resolved.draft.digest
    # Plans have a copy of it, which counts.
    model = dump_plain(resolved.model)
    del model["sampling"]
    sparsity = plan.pop("sparsity")
    if sparsity is not None and resolved.thresholds is not None:
        found = resolved.thresholds
        limits = [list(pair) for pair in found.limits]
        if found.expert_limits is not None:
            limits = [[*pair, *own] for pair, own in zip(limits, found.expert_limits, strict=True)]
        plan["sparsity"] = {"method": sparsity["method"], "thresholds": limits}
    layers = [_dump_layer(layer) for layer in resolved.layers]
    return hash_json(
        {
            "plan": plan,
            "layers": layers,
            "device": dump_plain(resolved.device),
            "model": model,
        }
    )
