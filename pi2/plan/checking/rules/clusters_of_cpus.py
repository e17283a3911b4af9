"""Clusters and features belong to CPUs, and clusters have different names.

Why: a GPU or NPU has no CPU cores to give threads to, and plans name clusters by their id.

Example: ``features = ["neon"]`` in a unit with ``kind = "gpu"``.

Fix: move them to the unit of kind ``cpu``; give every cluster its own id.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P252"
SEVERITY = "error"
NEEDS = ("device",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look through all units."""
    seen: set[str] = set()
    for name, unit in facts.device.units.items():
        for key in ("features", "clusters"):
            if unit.kind != "cpu" and getattr(unit, key):
                yield Finding(
                    document="device",
                    path=("units", name, key),
                    at="key",
                    message=f"`{key}` belongs to CPUs, the unit `{name}` is of kind {unit.kind}",
                    help=f"move `{key}` to a unit of kind cpu",
                )
        for number, cluster in enumerate(unit.clusters):
            if cluster.id in seen:
                yield Finding(
                    document="device",
                    path=("units", name, "clusters", number, "id"),
                    message=f"two clusters are called `{cluster.id}`",
                    help="give every cluster its own id",
                )
            seen.add(cluster.id)
