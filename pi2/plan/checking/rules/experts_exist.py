"""A token's experts are not more than the layer has.

Why: the router picks ``active_experts`` different ones of ``experts``.

Example: ``active_experts = 8`` with ``experts = 4``.

Fix: take both numbers from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P249"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare active_experts with experts."""
    moe = facts.model.moe
    if moe is None or moe.active_experts <= moe.experts:
        return
    yield Finding(
        document="model",
        path=("moe", "active_experts"),
        message=f"{moe.active_experts} active experts, a layer has {moe.experts}",
        help="take the number from the checkpoint's configuration",
        origins=(
            Origin(document="model", path=("moe", "experts"), text=f"experts = {moe.experts}"),
        ),
    )
