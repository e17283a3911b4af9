"""Segments, and units that use main memory, add up to no more than the budget.

Why: the budget is a promise about the whole process; memory that no segment accounts for cannot
be kept.

Example: ``budget = "32 MiB"`` with segments of 20 MiB and 16 MiB.

Fix: raise ``memory.budget``, or lower the segment that can give: usually ``cold``, the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pi2.plan.arithmetic.resolved import uses_main_memory
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import approximate_bytes, format_bytes, write_least, write_most
from pi2.plan.toml.paths import KeyPath

CODE = "P201"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the sum of the segments with the budget."""
    memory = facts.plan.memory
    sizes = {name: int(size) for name, size in memory.segments}
    cold = sizes["cold"]
    for name, unit in memory.units.items():
        if name in facts.device.units and uses_main_memory(facts.plan, facts.device, name):
            sizes[f"units.{name}"] = int(unit.budget)
    total = sum(sizes.values())
    excess = total - memory.budget
    if excess <= 0:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    help_text = f"raise the budget to {write_least(total)}"
    if cold > excess:
        help_text += f", or lower cold to {write_most(cold - excess)}"
    yield Finding(
        path=("memory", "budget"),
        message=f"the segments{_name_units(sizes)} add up to {format_bytes(total)}, "
        f"{approximate_bytes(excess)} more than the budget of {format_bytes(memory.budget)}",
        help=help_text,
        origins=(
            Origin(
                document="plan",
                path=_find_key(largest),
                text=f"the largest is {largest} with {format_bytes(sizes[largest])}",
            ),
        ),
    )


def _name_units(sizes: Mapping[str, int]) -> str:
    return " and units" if any(name.startswith("units.") for name in sizes) else ""


def _find_key(name: str) -> KeyPath:
    unit = name.removeprefix("units.")
    return ("memory", "units", unit, "budget") if unit != name else ("memory", "segments", name)
