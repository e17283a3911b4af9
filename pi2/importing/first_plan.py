"""The plan of a first run: everything in memory if this machine has it, else as much as fits."""

from __future__ import annotations

import tomllib

from pi2.plan.arithmetic.sizes import count_runtime
from pi2.plan.authoring.drafting import RUNTIME_BYTES, Wish, draft_plan
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.quantities import BYTE_UNITS, parse_quantity
from pi2.plan.weights.layout import ScalesPlace, round_up

MEMORY_SHARE = 0.8
"""Share of the memory that is free now: other programs go on meanwhile."""
_ROOM = 1 << 50
"""More memory than any model needs."""


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

    def draft(budget_bytes: int) -> str:
        wish = Wish(
            device=device.id,
            model=f"./{model.id}.model.toml",
            store=store,
            budget_bytes=budget_bytes,
            name=(model.name or model.id)[:120],
            scales=scales,
        )
        return draft_plan(wish, device, model)

    segments = tomllib.loads(draft(_ROOM))["memory"]["segments"]
    sizes = {key: int(parse_quantity(size, BYTE_UNITS)) for key, size in segments.items()}
    whole = _add_runtime(model, sum(sizes.values()) - sizes["runtime"])
    free = int(available_bytes * MEMORY_SHARE) if available_bytes else whole
    return draft(min(whole, free))


def _add_runtime(model: Model, other_bytes: int) -> int:
    """The budget, in whole MiB, that has ``other_bytes`` beside the segment of the runtime, which
    grows with the budget itself."""
    budget = 0
    while True:
        needed = round_up(other_bytes + count_runtime(model, budget, RUNTIME_BYTES), 1 << 20)
        if needed <= budget:
            return budget
        budget = needed
