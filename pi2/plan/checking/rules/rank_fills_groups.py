"""The rank of predictors is a multiple of 32.

Why: quantised weights share a scale in groups of 32, and a group never spans two rows.  Widths of
the model may be any: `pi2 convert` fills up their last group with zeros.

Example: ``rank = 50``.

Fix: take the next multiple of 32; `pi2 convert` fills up the predictors' matrices.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.weights.layout import GROUP

CODE = "P242"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Divide rank by the group."""
    predictor = facts.model.predictor
    if predictor is not None and predictor.rank % GROUP:
        yield Finding(
            document="model",
            path=("predictor", "rank"),
            message=f"rank is {predictor.rank}, expected a multiple of {GROUP}",
            help="take the number from the checkpoint's configuration",
        )
