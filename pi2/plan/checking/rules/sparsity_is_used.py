"""``[sparsity]`` counts where ``decode.predictor`` is ``"gate"``, or ``"router"`` in a mixture.

Why: thresholds are compared with gates, which only these predictors compute first: ``gate`` those
of all neurons, which it keeps in memory, ``router`` those of the chosen experts, which it reads.
``none`` computes every neuron, and a low-rank predictor names neurons by itself. A GPU that has the
whole model computes all of the chosen experts.

Example: ``[sparsity]`` in a plan with ``predictor = "none"``.

Fix: ``predictor = "gate"``, with room for the gate rows in ``memory.segments.predictor``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P260"
SEVERITY = "warning"
NEEDS = ("plan", "resolved")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the predictor that uses thresholds."""
    plan = facts.plan
    if plan.sparsity is None or plan.decode.predictor == "gate" or facts.resolved.reads_gates:
        return
    yield Finding(
        path=("decode", "predictor"),
        message=f'[sparsity] does nothing with predictor = "{plan.decode.predictor}"',
        help='write predictor = "gate"',
    )
