"""The shares of a split add up to 1.

Why: every neuron of a layer is computed exactly once, by one unit.

Example: ``split = { cpu = 0.3, npu = 0.8 }``.

Fix: change one of the shares; 0 leaves a unit out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.splits import list_placed_splits, list_row_splits
from pi2.plan.toml.paths import KeyPath

CODE = "P210"
SEVERITY = "error"
NEEDS = ("plan",)

TOLERANCE = 1e-6


def check(facts: Facts) -> Iterator[Finding]:
    """Add up every split."""
    for placed in (*list_placed_splits(facts.plan), *list_row_splits(facts.plan)):
        yield from _check_split(placed.split, placed.path, placed.subject)


def _check_split(split: Mapping[str, float], path: KeyPath, subject: str) -> Iterator[Finding]:
    total = sum(split.values())
    if abs(total - 1.0) <= TOLERANCE:
        return
    unit = max(split, key=lambda name: split[name])
    wanted = split[unit] - (total - 1.0)
    help_text = "change the shares so that they add up to 1"
    if 0.0 <= wanted <= 1.0:
        verb = "lower" if total > 1.0 else "raise"
        help_text = f"{verb} {unit} to {wanted:.6g}"
    yield Finding(
        path=path,
        message=f"the shares of {subject} add up to {total:.6g}, expected 1",
        help=help_text,
    )
