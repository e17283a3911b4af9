"""Plans that have no file yet: their values, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.documents.plan_memory import Segments
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.weights.layout import BundleLayout

if TYPE_CHECKING:
    from pi2.planning.wish import Wish


def make_plan_values(
    wish: Wish, *, predictor: str, kv: str, chunk: int, bundle: BundleLayout
) -> dict[str, Any]:
    """A plan without sizes; UserError P026 for a device without a CPU."""
    unit = next((name for name, item in wish.device.units.items() if item.kind == "cpu"), None)
    if unit is None:
        raise UserError.of(
            "P026",
            f"the device {wish.device.id} has no CPU",
            help="add a unit of the kind cpu to the device",
        )
    return {
        "schema_version": 2,
        "device": wish.device.id,
        "model": wish.model.id,
        "store": f"stores/{wish.model.id}",
        "memory": {"budget": "1 B", "segments": dict.fromkeys(Segments.model_fields, "0 B")},
        "bundle": {"stride": format_bytes(bundle.stride)}
        | ({} if bundle.scales == "inline" else {"scales": bundle.scales}),
        "layers": {"split": {unit: 1.0}, "hot": 0.0},
        "prefill": {"chunk": chunk},
        "decode": {"predictor": predictor, "batch": wish.batch},
        "kv": {"type": kv, "context": wish.context},
    }


def resolve_values(values: Mapping[str, Any], device: Device, model: Model) -> ResolvedPlan:
    """Put a plan's values, its device and its model together."""
    plan = Plan.model_validate_json(json.dumps(values))
    return ResolvedPlan(plan=plan, device=device, model=model)
