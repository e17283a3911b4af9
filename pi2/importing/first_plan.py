"""The plan of a first run: everything in memory if this machine has it, else as much as fits."""

from __future__ import annotations

import tomllib

from pi2.diagnostics import UserError
from pi2.plan.authoring.drafting import MOST_CONTEXT, Wish, draft_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import BYTE_UNITS, approximate_bytes, parse_quantity
from pi2.plan.weights.layout import ScalesPlace

LEAST_CONTEXT = 512
"""Tokens of the shortest context that is chosen without being asked for."""
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
    is not known.  Where the usual context does not fit into `MEMORY_SHARE` of it, a shorter one is
    taken, of no less than `LEAST_CONTEXT` tokens.  Raises `UserError` P026 if not even that fits.
    """

    def draft(budget_bytes: int | None, context: int | None = None) -> str:
        wish = Wish(
            device=device.id,
            model=f"./{model.id}.model.toml",
            store=store,
            budget_bytes=budget_bytes,
            context=context,
            name=(model.name or model.id)[:120],
            scales=scales,
        )
        return draft_plan(wish, device, model)

    whole = draft(None)
    budget = parse_quantity(tomllib.loads(whole)["memory"]["budget"], BYTE_UNITS)
    free = int(available_bytes * MEMORY_SHARE)
    if not available_bytes or free >= budget:
        return whole
    usual = min(model.shape.context, MOST_CONTEXT)
    context = usual
    while True:
        try:
            text = draft(free, context)
        except UserError as error:
            if error.diagnostics[0].code != "P026" or context <= LEAST_CONTEXT:
                raise
            context = max(LEAST_CONTEXT, context // 2)
            continue
        if context == usual:
            return text
        line = f"context = {context}\n"
        reason = f"of {usual}, which did not fit into {approximate_bytes(free)}"
        return text.replace(line, f"{line.rstrip()}  # {reason}\n", 1)
