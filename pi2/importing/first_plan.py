"""The plan of a first run: everything in memory if this machine has it, else as much as fits."""

from __future__ import annotations

import tomllib

from pi2.plan.authoring.drafting import Wish, draft_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import BYTE_UNITS, parse_quantity
from pi2.plan.weights.layout import ScalesPlace

MEMORY_SHARE = 0.8
"""Share of the memory that is free now: other programs go on meanwhile."""


def draft_first_plan(
    model: Model,
    device: Device,
    available_bytes: int,
    store: str,
    scales: ScalesPlace = "inline",
) -> str:
    """Text of a plan for ``model``, whose file and ``store`` lie beside it.

    ``scales``: where the store has them.  ``available_bytes`` is the memory that is free, 0 if that
    is not known.  Raises `UserError` P026 if not even the smallest plan fits into `MEMORY_SHARE` of
    it.
    """

    def draft(budget_bytes: int | None) -> str:
        wish = Wish(
            device=device.id,
            model=f"./{model.id}.model.toml",
            store=store,
            budget_bytes=budget_bytes,
            name=(model.name or model.id)[:120],
            scales=scales,
        )
        return draft_plan(wish, device, model)

    whole = draft(None)
    budget = parse_quantity(tomllib.loads(whole)["memory"]["budget"], BYTE_UNITS)
    free = int(available_bytes * MEMORY_SHARE)
    return draft(free) if available_bytes and free < budget else whole
