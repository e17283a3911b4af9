"""A layer's neurons are divided between the sparse unit and at most one dense unit.

Why: the dense unit owns the first neurons in stored order, the hottest ones, and computes all of
them; the sparse unit computes what a predictor names of the rest.  There is one such boundary.

Example: ``split = { cpu = 0.4, gpu = 0.3, npu = 0.3 }``.

Fix: give each layer to one unit beside the sparse one; other layers may have another
(``layers.overrides``).
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import find_sparse_unit
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.splits import list_placed_splits

CODE = "P262"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Count the units of every split, and of each split with those for several sequences."""
    sparse = find_sparse_unit(facts.plan, facts.device)
    of_layers: str | None = None
    for placed in list_placed_splits(facts.plan):
        dense = [name for name, share in placed.split.items() if share > 0 and name != sparse]
        if len(dense) > 1:
            yield Finding(
                path=placed.path,
                message=f"{placed.subject} have two units beside `{sparse}`: "
                f"{', '.join(f'`{name}`' for name in dense)}",
                help=f"give the share of `{dense[-1]}` to `{dense[0]}` or `{sparse}`",
            )
            continue
        if "batches" not in placed.path:
            of_layers = dense[0] if dense else None
        elif dense and of_layers is not None and dense[0] != of_layers:
            yield Finding(
                path=placed.path,
                message=f"{placed.subject} name `{dense[0]}`, and `{of_layers}` without batches",
                help=f"name `{of_layers}` here, too: a unit keeps its neurons whatever the batch",
            )
