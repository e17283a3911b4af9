"""``decode.predictor = "router"`` needs a mixture of experts.

Why: the router of a mixture says which experts compute a token; a model without experts has none,
and every token takes all of its FFN.  Experts that read what their weights have multiplied
(``moe.weighs = "input"``) are computed as a whole: predictors and gates do not know the weights.

Example: ``predictor = "router"`` for a model file without ``[moe]``.

Fix: ``"low-rank"`` for a model with predictors, ``"gate"`` for the ReLU family, else ``"none"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.model import Model

CODE = "P268"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the model's experts, and for what names single neurons of those that cannot."""
    model = facts.model
    is_weighed = model.moe is not None and model.moe.weighs == "input"
    if is_weighed and facts.plan.decode.predictor not in ("none", "router"):
        yield _refuse(("decode", "predictor"), model, 'write predictor = "router"')
    elif is_weighed and facts.plan.sparsity is not None:
        yield _refuse(("sparsity",), model, "leave the table [sparsity] out")
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


def _refuse(path: tuple[str, ...], model: Model, remedy: str) -> Finding:
    return Finding(
        path=path,
        message=f"which neurons of an expert fire in `{model.id}` depends on the expert's weight, "
        "which neither predictors nor gates know",
        help=remedy,
        origins=(Origin(document="model", path=("moe", "weighs"), text='weighs = "input"'),),
    )
