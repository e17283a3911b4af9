"""Every figure and feature of a device is stated once.

Why: of two rates for the same reads, or for the same operands, it is unclear which one counts; a
feature that is listed twice was meant to be another one.

Example: two ``[[storage.reads]]`` with ``pattern = "random"`` and ``block = "4 KiB"`` and nothing
else that tells them apart.

Fix: remove one of them, or state what is different: ``range``, ``depth``, ``threads``,
``cluster``, ``burst``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.toml.paths import KeyPath

CODE = "P256"
SEVERITY = "error"
NEEDS = ("device",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for reads, operand types and features that come again."""
    device = facts.device
    reads = [
        (item.pattern, item.block, item.range, item.depth, item.threads, item.cluster, item.burst)
        for item in device.storage.reads
    ]
    yield from _find_again(("storage", "reads"), reads, "the same reads")
    for name, unit in device.units.items():
        operands = [item.precision for item in unit.compute]
        yield from _find_again(("units", name, "compute"), operands, "the same operands")
        features = unit.features or ()
        yield from _find_again(("units", name, "features"), features, "the same feature")


def _find_again(path: KeyPath, items: Sequence[Hashable], what: str) -> Iterator[Finding]:
    first: dict[Hashable, int] = {}
    for number, item in enumerate(items):
        if item in first:
            origin = Origin(document="device", path=(*path, first[item]), text="the first one")
            yield Finding(
                document="device",
                path=(*path, number),
                message=f"{what} are stated twice",
                help="remove one of them, or say what is different",
                origins=(origin,),
            )
        first.setdefault(item, number)
