"""A split names units that the device has, and so do the tables of single units.

Why: work cannot be given to a unit that is not there; the names are those of the device's
``[units.NAME]`` tables.

Example: ``split = { cpu = 0.5, npu = 0.5 }`` for a device whose only unit is ``cpu``.

Fix: use one of the device's units, or another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.checking.splits import list_placed_splits, list_row_splits
from pi2.plan.documents.fields import suggest
from pi2.plan.toml.paths import KeyPath

CODE = "P211"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Look every name up in the device."""
    plan = facts.plan
    for placed in (*list_placed_splits(plan), *list_row_splits(plan)):
        yield from _check_names(facts, placed.split, placed.path)
    yield from _check_names(facts, plan.units, ("units",))
    yield from _check_names(facts, plan.memory.units, ("memory", "units"))
    if plan.prefill.unit is not None:
        yield from _check_names(facts, [plan.prefill.unit], ("prefill", "unit"), at="value")


def _check_names(
    facts: Facts, names: Iterable[str], path: KeyPath, at: Literal["key", "value"] = "key"
) -> Iterator[Finding]:
    units = facts.device.units
    for name in names:
        if name in units:
            continue
        near = suggest(name, units)
        listed = ", ".join(units)
        yield Finding(
            path=(*path, name) if at == "key" else path,
            at=at,
            message=f"the device `{facts.device.id}` has no unit `{name}`",
            help=f"did you mean `{near}`?" if near else f"its units: {listed}",
            origins=(Origin(document="device", path=("units",), text=f"units: {listed}"),),
        )
