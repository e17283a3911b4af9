"""Reads in two phases read less than reads in one.

Why: ``pipeline.phases = 2`` reads the gate first, and up and down only where the gate is open.
Reads begin and end at the device's blocks: where the gate's block is also the bundle's last one,
or where neurons have no gate, the first read is the whole bundle and the second is for nothing.
Nor is there anything to wait for where no gate is ever closed (SiLU, GELU), or where the gate's
bias comes with the end of the bundle.

Example: ``phases = 2`` for bundles of 432 bytes and blocks of 512.

Fix: ``phases = 1``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.sizes import count_gate_read_bytes, find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P222"
SEVERITY = "warning"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Ask whether gates decide about reads, and compare the gate with the bundle, in blocks."""
    resolved = facts.resolved
    plan, bundle, model = resolved.plan, resolved.bundle, resolved.model
    if plan.pipeline.phases == 1 or count_gate_read_bytes(resolved):
        return
    if not model.ffn.gated:
        reason = "the model's neurons have no gate"
    elif model.is_smooth:
        reason = f"no gate of {model.ffn.activation} is ever closed"
    elif bundle.biases:
        reason = "a gate's bias comes with the end of the bundle"
    elif plan.decode.predictor != "low-rank":
        return
    else:
        block = find_block_bytes(resolved.device)
        reason = f"gate and bundle end in the same block of {block} bytes"
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
