"""``decode.predictor = "gate"`` needs an activation that is zero for some gates, or ``[sparsity]``.

Why: with ReLU, dReLU, FATReLU and ReLU² a neuron whose gate is below the threshold adds nothing,
so that it may be left out, and so may one that a cutoff closes (``ffn.gate_sparsity``); else SiLU
and GELU are zero nowhere, and something must say what counts as zero.  With ``"router"``, a
``[sparsity]`` needs thresholds, too.  A plan that computes nothing, with the backend ``null`` for
every unit, may state ``sparsity.target`` alone: it is simulated with that share.

Example: ``predictor = "gate"`` for a model with ``activation = "silu"``.

Fix: ``predictor = "none"``, or ``"router"`` for a mixture of experts; or calibrate thresholds with
`pi2 sparsity calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P234"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare predictor and activation."""
    plan, smooth = facts.plan, facts.model.is_smooth
    if plan.decode.predictor != "gate" or not smooth:
        return
    if plan.sparsity is not None:
        computes = {*plan.backends.values(), *(unit.backend for unit in plan.units.values())}
        counted = computes <= {"null", None} and plan.sparsity.target is not None
        if plan.sparsity.thresholds is None and not counted:
            yield Finding(
                path=("sparsity",),
                message="no thresholds: nothing says which neurons are inactive",
                help="make them with `pi2 sparsity calibrate`; only plans with the backend "
                '"null" for every unit, and a target, go without',
                at="key",
            )
        return
    if facts.model.cut_layers:
        return
    name = facts.model.ffn.activation
    exact = "none" if facts.model.moe is None else "router"
    yield Finding(
        path=("decode", "predictor"),
        message=f"the gate does not show which neurons are inactive: the activation is {name}",
        help=f'write predictor = "{exact}", or add thresholds: `pi2 sparsity calibrate`',
        origins=(
            Origin(document="model", path=("ffn", "activation"), text=f'activation = "{name}"'),
        ),
    )
