"""Rows of projections and of the head are divided between the sparse unit and one other.

Why: the other unit keeps the first rows of each matrix and computes them while the sparse unit
computes the rest; there is one such boundary, and the sparse unit has the last rows.  Weights of
rows are not read again when the unit is lost, so that the run cannot go on without it.

Example: ``projections.attention = { npu = 0.5, gpu = 0.5 }``, or rows for a unit with
``on_failure = "cpu"``.

Fix: name the sparse unit and one other in both splits, and leave ``on_failure`` at ``"stop"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import find_sparse_unit
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.checking.splits import list_row_splits

CODE = "P267"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Count the units of both splits together."""
    plan, sparse = facts.plan, find_sparse_unit(facts.plan, facts.device)
    found: list[str] = []
    for placed in list_row_splits(plan):
        if placed.split.get(sparse, 0.0) <= 0:
            yield Finding(
                path=placed.path,
                message=f"`{sparse}` has no rows of {placed.subject}",
                help=f"give it a part, such as {sparse} = 0.1, and the others less",
            )
        for name, share in placed.split.items():
            if share <= 0 or name == sparse or name in found:
                continue
            found.append(name)
            if len(found) > 1:
                yield Finding(
                    path=(*placed.path, name),
                    at="key",
                    message=f"rows are given to `{found[0]}` and to `{name}`",
                    help=f"give the share of `{name}` to `{found[0]}` or `{sparse}`",
                )
                continue
            settings = plan.units.get(name)
            if settings is not None and settings.on_failure != "stop":
                yield Finding(
                    path=("units", name, "on_failure"),
                    message=f"a run cannot go on without `{name}`, which has rows of "
                    f"{placed.subject}",
                    help='write on_failure = "stop", or take the rows from the unit',
                    origins=(
                        Origin(document="plan", path=placed.path, text=f"{name} = {share:g}"),
                    ),
                )
