"""Every unit that layers use has a backend.

Why: a backend computes for a kind of unit, or for the unit that `units` names; without one, the
unit's share of the neurons would not be computed.

Example: ``split = { npu = 1.0 }`` with ``backends = { cpu = "cpu" }``.

Fix: name a backend for the kind, or give its share to another unit.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.checking.splits import list_placed_splits, list_row_splits
from pi2.plan.toml.paths import KeyPath

CODE = "P232"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Look up the kind of every unit with a share."""
    plan, device = facts.plan, facts.device
    paths: dict[str, KeyPath] = {}
    for placed in (*list_placed_splits(plan), *list_row_splits(plan)):
        for unit, share in placed.split.items():
            if share > 0:
                paths.setdefault(unit, (*placed.path, unit))
    if plan.prefill.unit is not None:
        paths.setdefault(plan.prefill.unit, ("prefill", "unit"))
    for unit, path in paths.items():
        settings = plan.units.get(unit)
        has_own = settings is not None and settings.backend is not None
        if has_own or unit not in device.units or device.units[unit].kind in plan.backends:
            continue
        kind = device.units[unit].kind
        listed = ", ".join(f'{key} = "{value}"' for key, value in plan.backends.items())
        yield Finding(
            path=path,
            at="value" if path == ("prefill", "unit") else "key",
            message=f"no backend is named for units of kind `{kind}`, such as `{unit}`",
            help=f"add a backend for {kind} to `backends`, or give the work to another unit",
            origins=(
                Origin(document="plan", path=("backends",), text=f"backends: {listed or 'none'}"),
            ),
        )
