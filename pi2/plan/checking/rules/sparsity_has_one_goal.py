"""``[sparsity]`` states one goal: ``target`` or ``max_perplexity_increase``.

Why: thresholds are calibrated to leave out a share of the work, or as much as a loss of quality
allows; one follows from the other.

Example: both of them, or neither.

Fix: keep one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P259"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Count the goals."""
    sparsity = facts.plan.sparsity
    if sparsity is None or (sparsity.target is None) != (sparsity.max_perplexity_increase is None):
        return
    message = "[sparsity] needs target or max_perplexity_increase"
    if sparsity.target is not None:
        message = "[sparsity] states target and max_perplexity_increase: one follows from the other"
    yield Finding(
        path=("sparsity",) if sparsity.target is None else ("sparsity", "target"),
        message=message,
        help="for example target = 0.5" if sparsity.target is None else "remove one of them",
        at="key",
    )
