"""``decode.predictor = "low-rank"`` needs a model with predictors.

Why: low-rank predictors are trained with the model and are part of its store.

Example: ``predictor = "low-rank"`` for a model file without ``[predictor]``.

Fix: ``"gate"``, which is exact for the ReLU family, ``"router"`` for a mixture of experts, or
``"none"``; or a model with predictors.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P233"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the model's predictors."""
    if facts.plan.decode.predictor != "low-rank" or facts.model.predictor is not None:
        return
    other = "none" if facts.model.is_smooth else "gate"
    if facts.model.moe is not None:
        other = "router"
    yield Finding(
        path=("decode", "predictor"),
        message=f"the model `{facts.model.id}` has no low-rank predictors",
        help=f'write predictor = "{other}"',
        origins=(Origin(document="model", path=(), text="the file has no table [predictor]"),),
    )
