"""``[sparsity]`` counts where ``decode.predictor`` is ``"gate"``.

Why: thresholds are compared with gates, which only this predictor computes first and keeps in
memory.  ``none`` computes every neuron, ``router`` all neurons of the chosen experts, and a
low-rank predictor names neurons by itself.

Example: ``[sparsity]`` in a plan with ``predictor = "none"``.

Fix: ``predictor = "gate"``, with room for the gate rows in ``memory.segments.predictor``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P260"
SEVERITY = "warning"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the predictor that uses thresholds."""
    plan = facts.plan
    if plan.sparsity is None or plan.decode.predictor == "gate":
        return
    yield Finding(
        path=("decode", "predictor"),
        message=f'[sparsity] does nothing with predictor = "{plan.decode.predictor}"',
        help='write predictor = "gate"',
    )
