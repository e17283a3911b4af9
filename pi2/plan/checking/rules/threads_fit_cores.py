"""No more compute threads than cores.

Why: threads without a core of their own take turns and wait for each other at every layer.

Example: ``threads.compute = 8`` for a device with 6 cores.

Fix: lower the number, or leave it out: one thread per core.  Where a device states no cores, the
machine is asked when the plan runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P230"
SEVERITY = "error"
NEEDS = ("plan", "device")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the threads with the cores of all CPU clusters."""
    threads = facts.plan.threads.compute
    clusters = {
        name: sum(cluster.cores for cluster in unit.clusters)
        for name, unit in facts.device.units.items()
        if unit.clusters
    }
    cores = sum(clusters.values())
    if threads is None or not clusters or threads <= cores:
        return
    yield Finding(
        path=("threads", "compute"),
        message=f"{threads} compute threads, the device `{facts.device.id}` has {cores} cores",
        help=f"write compute = {cores}, or leave it out",
        origins=tuple(
            Origin(
                document="device",
                path=("units", name, "clusters"),
                text=f"the clusters of {name} have {number} cores",
            )
            for name, number in clusters.items()
        ),
    )
