"""Segments add up to no more than the budget.

Why: the budget is a promise about the whole process; memory that no segment accounts for cannot
be kept.

Example: ``budget = "32 MiB"`` with segments of 20 MiB and 16 MiB.

Fix: raise ``memory.budget``, or lower the segment that can give: usually ``cold``, the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import approximate_bytes, format_bytes

CODE = "P201"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the sum of the segments with the budget."""
    memory = facts.plan.memory
    sizes = {name: int(size) for name, size in memory.segments}
    total = sum(sizes.values())
    excess = total - memory.budget
    if excess <= 0:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    help_text = f"raise the budget to {format_bytes(total)}"
    if sizes["cold"] > excess:
        help_text += f", or lower cold to {format_bytes(sizes['cold'] - excess)}"
    yield Finding(
        path=("memory", "budget"),
        message=f"the segments add up to {format_bytes(total)}, "
        f"{approximate_bytes(excess)} more than the budget of {format_bytes(memory.budget)}",
        help=help_text,
        origins=(
            Origin(
                document="plan",
                path=("memory", "segments", largest),
                text=f"the largest segment is {largest} with {format_bytes(sizes[largest])}",
            ),
        ),
    )
