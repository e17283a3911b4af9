"""A twin is there for what a dial would leave out.

Why: every neuron that is named is read unless ``experts.least_weight``, ``experts.read_best`` or
``experts.most_reads`` leave out its expert, or ``decode.leave_out`` or
``decode.missing_threshold`` the neuron.  Without one of them, twins take memory and compute
nothing.

Example: ``[twin]`` in a plan without any of these.

Fix: ``experts.most_reads = 0`` lets twins compute all that is not in memory; a smaller share is
``experts.least_weight = 0.1``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P291"
SEVERITY = "warning"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for a dial that leaves something out."""
    plan = facts.plan
    routed = plan.decode.predictor == "router"
    if plan.twin is None or plan.decode.predictor not in ("router", "low-rank"):
        return
    leaves_out = plan.experts.leaves_out if routed else plan.decode.leaves_out
    if leaves_out:
        return
    example = "experts.least_weight = 0.1" if routed else "decode.leave_out = 0.02"
    yield Finding(
        path=("twin",),
        message="twins compute nothing: every neuron that is named is read",
        help=f"say what is not worth a read, such as {example}, or leave the table [twin] out",
    )
