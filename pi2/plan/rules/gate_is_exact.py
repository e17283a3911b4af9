"""``decode.predictor = "gate"`` needs an activation that is zero where the gate is not positive.

Why: with ReLU, dReLU, FATReLU and ReLU² a neuron whose gate is below the threshold adds nothing,
so that it may be left out; SiLU and GELU are zero nowhere.

Example: ``predictor = "gate"`` for a model with ``activation = "silu"``.

Fix: ``predictor = "none"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.findings import Facts, Finding, Origin

CODE = "P234"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare predictor and activation."""
    if facts.plan.decode.predictor != "gate" or not facts.model.is_smooth:
        return
    name = facts.model.ffn.activation
    yield Finding(
        path=("decode", "predictor"),
        message=f"the gate says nothing of inactive neurons: the activation is {name}",
        help='write predictor = "none"',
        origins=(
            Origin(document="model", path=("ffn", "activation"), text=f'activation = "{name}"'),
        ),
    )
