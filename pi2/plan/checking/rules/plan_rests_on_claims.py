"""A plan does not rest on read rates that only a vendor claims.

Why: how fast a token comes depends on how fast memory and flash are read. What vendors state is
the rate of the interface or of an empty device; `pi2 simulate` takes it for what programs reach.

Example: a plan for a device whose only random read rate has ``status = "vendor-claimed"``.

Fix: run ``pi2 probe -o my.device.toml`` on the device, and name that file as the plan's device; or
look for somebody else's measurements with ``pi2 profile search``. For memory, what an interface can
do is ``peak_bandwidth``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.findings import Origin as Place
from pi2.plan.documents.common import Origin
from pi2.plan.toml.paths import KeyPath

CODE = "P403"
SEVERITY = "warning"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Look at the rates that simulations and sizes are computed from."""
    claimed = [path for path, figure in _list_rates(facts) if figure.status == "vendor-claimed"]
    if not claimed:
        return
    places = tuple(
        Place(document="device", path=(*path, "status"), text='status = "vendor-claimed"')
        for path in claimed
    )
    count = "a read rate" if len(claimed) == 1 else f"{len(claimed)} read rates"
    yield Finding(
        path=("device",),
        message=f"the plan rests on {count} that only the vendor claims",
        help="`pi2 probe -o FILE` measures it; until then, predictions are optimistic",
        origins=places,
    )


def _list_rates(facts: Facts) -> Iterator[tuple[KeyPath, Origin]]:
    device = facts.device
    if device.memory.read_bandwidth is not None:
        yield ("memory", "read_bandwidth"), device.memory.read_bandwidth
    for name in sorted({*facts.plan.layers.split, *_list_overridden(facts)}):
        unit = device.units.get(name)
        if unit is not None and unit.read_bandwidth is not None:
            yield ("units", name, "read_bandwidth"), unit.read_bandwidth
    # A pattern that was measured too does not rest on what is claimed.
    reads = device.storage.reads
    known = {figure.pattern for figure in reads if figure.status != "vendor-claimed"}
    for number, figure in enumerate(reads):
        if figure.pattern not in known:
            yield ("storage", "reads", number), figure


def _list_overridden(facts: Facts) -> Iterator[str]:
    for override in facts.plan.layers.overrides:
        yield from override.split or ()
