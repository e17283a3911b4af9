"""A resolved plan as JSON: how a bundle keeps plan, device, model and thresholds.

Written where the bundle is built, with pydantic; read where it runs, with its stand-in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan

PLAN = "plan.json"
"""File of a bundle."""


def write_resolved(resolved: ResolvedPlan) -> str:
    """Return the JSON of a resolved plan."""
    documents: dict[str, Any] = {
        "digest": resolved.digest,
        "plan": resolved.plan.model_dump(mode="json"),
        "device": resolved.device.model_dump(mode="json"),
        "model": resolved.model.model_dump(mode="json"),
        "thresholds": None
        if resolved.thresholds is None
        else resolved.thresholds.model_dump(mode="json"),
    }
    return json.dumps(documents, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def read_resolved(path: Path) -> ResolvedPlan:
    """Read what `write_resolved` wrote to ``path``; OSError, ValueError or KeyError if it is not
    that."""
    documents = json.loads(path.read_text(encoding="utf-8"))
    thresholds = None
    if documents["thresholds"] is not None:
        from pi2.plan.reading.thresholds import Thresholds

        thresholds = Thresholds.model_validate_json(json.dumps(documents["thresholds"]))
    resolved = ResolvedPlan(
        plan=Plan.model_validate_json(json.dumps(documents["plan"])),
        device=Device.model_validate_json(json.dumps(documents["device"])),
        model=Model.model_validate_json(json.dumps(documents["model"])),
        path=path,
        thresholds=thresholds,
    )
    # It was computed of the documents as they were read and checked.
    resolved.__dict__["digest"] = str(documents["digest"])
    return resolved
