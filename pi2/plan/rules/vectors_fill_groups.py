"""Widths are multiples of 32.

Why: quantised weights share a scale in groups of 32, and a group never spans two rows.  It
concerns the width of the model, of all heads together, and the rank of the predictors.

Example: ``hidden = 250``.

Fix: take the numbers from the checkpoint's configuration; a checkpoint with such widths cannot be
converted.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.findings import Facts, Finding, Origin
from pi2.plan.layout import GROUP

CODE = "P242"
SEVERITY = "error"
NEEDS = ("model",)

_HELP = "take the number from the checkpoint's configuration"


def check(facts: Facts) -> Iterator[Finding]:
    """Divide hidden, heads x head_dim and rank by the group."""
    model = facts.model
    shape = model.shape
    query = shape.heads * shape.head_dim
    if shape.hidden % GROUP:
        yield Finding(
            document="model",
            path=("shape", "hidden"),
            message=f"hidden is {shape.hidden}, expected a multiple of {GROUP}",
            help=_HELP,
        )
    if query % GROUP:
        yield Finding(
            document="model",
            path=("shape", "head_dim"),
            message=f"heads x head_dim is {query}, expected a multiple of {GROUP}",
            help=_HELP,
            origins=(
                Origin(document="model", path=("shape", "heads"), text=f"heads = {shape.heads}"),
            ),
        )
    if model.predictor is not None and model.predictor.rank % GROUP:
        yield Finding(
            document="model",
            path=("predictor", "rank"),
            message=f"rank is {model.predictor.rank}, expected a multiple of {GROUP}",
            help=_HELP,
        )
