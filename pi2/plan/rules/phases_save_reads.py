"""Reads in two phases read less than reads in one.

Why: ``pipeline.phases = 2`` reads the gate first, and up and down only where the gate is open.
Reads begin and end at the device's blocks: where the gate's block is also the bundle's last one, or
where neurons have no gate, the first read is the whole bundle and the second is for nothing.

Example: ``phases = 2`` for bundles of 432 bytes and blocks of 512.

Fix: ``phases = 1``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.findings import Facts, Finding, Origin
from pi2.plan.layout import round_up, vector_bytes
from pi2.plan.sizes import find_block_bytes

CODE = "P222"
SEVERITY = "warning"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the gate with the bundle, in blocks."""
    resolved = facts.resolved
    if resolved.plan.pipeline.phases == 1:
        return
    block = find_block_bytes(resolved.device)
    bundle, model = resolved.bundle, resolved.model
    whole = round_up(bundle.used_bytes, block)
    if not model.ffn.gated:
        reason = "the model's neurons have no gate"
    elif round_up(vector_bytes(bundle.hidden, bundle.precision), block) >= whole:
        reason = f"gate and bundle end in the same block of {block} bytes"
    else:
        return
    yield Finding(
        path=("pipeline", "phases"),
        message=f"two phases read no less than one: {reason}",
        help="write phases = 1",
        origins=(
            Origin(
                document="plan", path=("bundle", "stride"), text=f"{bundle.used_bytes} bytes used"
            ),
        ),
    )
