"""Every unit beside the sparse one has memory for what it keeps.

Why: a unit's neurons lie in its own memory, such as a graphics card's, and its backend says how
much they take there: a plan that cannot work is known before anything is read.  A unit that uses
main memory may have a budget, too; without one, what it keeps is part of
``memory.segments.hot``.

Example: a share for ``gpu`` without ``[memory.units.gpu]``, or with less than its neurons take.

Fix: write ``memory.units.NAME.budget``, or lower the unit's share.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.sizes import count_unit_needs
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.quantities import (
    approximate_bytes,
    compare_bytes,
    format_bytes,
    write_least,
)

CODE = "P264"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare each unit's need with its budget, and with the memory that the device says it has."""
    resolved = facts.resolved
    for name, need in count_unit_needs(resolved).items():
        memory = resolved.plan.memory.units.get(name)
        wanted = write_least(need.bytes)
        if memory is None and resolved.shares_main_memory(name):
            continue
        if memory is None:
            yield Finding(
                path=("memory",),
                at="key",
                message=f"`{name}` has no memory, and needs {approximate_bytes(need.bytes)}: "
                f"{need.explanation}",
                help=f'write units.{name}.budget = "{wanted}" into [memory]',
            )
        elif memory.budget < need.bytes:
            has, needs = compare_bytes(memory.budget, need.bytes)
            yield Finding(
                path=("memory", "units", name, "budget"),
                message=f"`{name}` has {has} and needs {needs}: {need.explanation}",
                help=f'write budget = "{wanted}", or lower the share of `{name}`',
            )
    for name, memory in resolved.plan.memory.units.items():
        unit = resolved.device.units.get(name)
        own = None if unit is None else unit.memory
        if memory.shares_main_memory and own is not None:
            yield Finding(
                path=("memory", "units", name, "shares_main_memory"),
                message=f"the device says that `{name}` has memory of its own",
                help="take the key out",
            )
        elif own is not None and own.capacity is not None and memory.budget > own.capacity:
            yield Finding(
                path=("memory", "units", name, "budget"),
                message=f"`{name}` has {format_bytes(own.capacity)} of memory, less than "
                f"{format_bytes(memory.budget)}",
                help=f'write budget = "{format_bytes(own.capacity)}" at most',
            )
