"""``decode.look_ahead`` needs ``decode.predictor = "low-rank"`` or ``"router"``.

Why: before attention a layer's gates are not known yet: computed there, they would name other
neurons, and exact decoding would not be exact.  Dense decoding predicts nothing.  A router may be
asked early: what it did not name then is read when it is asked again.

Example: ``look_ahead = "attention"`` with ``predictor = "gate"``.

Fix: ``look_ahead = "none"``; or ``predictor = "low-rank"`` for a model with predictors, or
``"router"`` for a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P254"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the two settings."""
    decode = facts.plan.decode
    if decode.look_ahead == "none" or decode.predictor in ("low-rank", "router"):
        return
    yield Finding(
        path=("decode", "look_ahead"),
        message=f'look_ahead = "{decode.look_ahead}" needs predictor = "low-rank" or "router", '
        f'not "{decode.predictor}"',
        help='write look_ahead = "none"',
        origins=(
            Origin(
                document="plan",
                path=("decode", "predictor"),
                text=f'predictor = "{decode.predictor}"',
            ),
        ),
    )
