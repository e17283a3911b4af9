"""``decode.predictor = "router"`` needs a mixture of experts.

Why: the router of a mixture says which experts compute a token; a model without experts has none,
and every token takes all of its FFN.

Example: ``predictor = "router"`` for a model file without ``[moe]``.

Fix: ``"low-rank"`` for a model with predictors, ``"gate"`` for the ReLU family, else ``"none"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P268"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the model's experts."""
    model = facts.model
    if facts.plan.decode.predictor != "router" or model.moe is not None:
        return
    other = "none" if model.is_smooth else "gate"
    if model.predictor is not None:
        other = "low-rank"
    yield Finding(
        path=("decode", "predictor"),
        message=f"the model `{model.id}` has no experts that a router could choose",
        help=f'write predictor = "{other}"',
        origins=(Origin(document="model", path=(), text="the file has no table [moe]"),),
    )
