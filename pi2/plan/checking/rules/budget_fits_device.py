"""The budget fits into the device's memory.

Why: a plan for more memory than the device has, or than its system leaves to one process, ends in
swapping or in the process being killed.

Example: ``budget = "12 GiB"`` for a device with ``usable = "10 GiB"``.

Fix: lower ``memory.budget`` and its segments.  Where a device states no memory, the machine is
asked when the plan runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import format_bytes, write_most

CODE = "P203"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the budget with usable, else installed memory."""
    budget, memory = facts.plan.memory.budget, facts.device.memory
    key = "usable" if memory.usable is not None else "capacity"
    limit = memory.usable if memory.usable is not None else memory.capacity
    if limit is None or budget <= limit:
        return
    yield Finding(
        path=("memory", "budget"),
        message=f"the budget is {format_bytes(budget)}, the device `{facts.device.id}` has "
        f"{format_bytes(limit)}",
        help=f"lower the budget and its segments to {write_most(limit)} or less",
        origins=(
            Origin(
                document="device", path=("memory", key), text=f'{key} = "{format_bytes(limit)}"'
            ),
        ),
    )
