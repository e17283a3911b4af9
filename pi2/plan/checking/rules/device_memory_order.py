"""Usable memory is not more than installed memory.

Why: ``usable`` is what the system leaves of ``capacity`` to one process.

Example: ``capacity = "8 GiB"`` with ``usable = "12 GiB"``.

Fix: correct one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.device import Memory
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.toml.paths import KeyPath

CODE = "P250"
SEVERITY = "error"
NEEDS = ("device",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare usable and capacity of main memory and of every unit's own."""
    device = facts.device
    memories: list[tuple[KeyPath, Memory]] = [(("memory",), device.memory)]
    for name, unit in device.units.items():
        if unit.memory is not None:
            memories.append((("units", name, "memory"), unit.memory))
    for path, memory in memories:
        if memory.usable is None or memory.capacity is None or memory.usable <= memory.capacity:
            continue
        capacity = format_bytes(memory.capacity)
        yield Finding(
            document="device",
            path=(*path, "usable"),
            message=f"usable memory is {format_bytes(memory.usable)}, installed are {capacity}",
            origins=(
                Origin(
                    document="device", path=(*path, "capacity"), text=f'capacity = "{capacity}"'
                ),
            ),
        )
