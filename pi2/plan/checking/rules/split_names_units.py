"""A split names units that the device has.

Why: work cannot be given to a unit that is not there; the names are those of the device's
``[units.NAME]`` tables.

Example: ``split = { cpu = 0.5, npu = 0.5 }`` for a device whose only unit is ``cpu``.

Fix: use one of the device's units, or another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.fields import suggest
from pi2.plan.toml.paths import KeyPath

CODE = "P211"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Look every name up in the device."""
    layers = facts.plan.layers
    yield from _check_names(facts, layers.split, ("layers", "split"))
    for number, override in enumerate(layers.overrides):
        path = ("layers", "overrides", number, "split")
        yield from _check_names(facts, override.split or (), path)


def _check_names(facts: Facts, names: Iterable[str], path: KeyPath) -> Iterator[Finding]:
    units = facts.device.units
    for name in names:
        if name in units:
            continue
        near = suggest(name, units)
        listed = ", ".join(units)
        yield Finding(
            path=(*path, name),
            at="key",
            message=f"the device `{facts.device.id}` has no unit `{name}`",
            help=f"did you mean `{near}`?" if near else f"its units: {listed}",
            origins=(Origin(document="device", path=("units",), text=f"units: {listed}"),),
        )
