"""``decode.missing_threshold`` is above ``decode.threshold``, of low-rank predictors.

Why: neurons are named by ``threshold`` first; of those, the ones that are not in memory are read
only from ``missing_threshold`` on.  One that is not higher leaves nothing out, and where no
predictor gives scores there is nothing to compare.

Example: ``threshold = 0.5`` with ``missing_threshold = 0.0``.

Fix: a higher ``missing_threshold``, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P255"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the settings of decoding."""
    decode = facts.plan.decode
    if decode.missing_threshold is None:
        return
    if decode.predictor != "low-rank":
        key, value = "predictor", f'"{decode.predictor}"'
        message = f"there are no scores to compare it with: predictor = {value}"
    elif decode.missing_threshold <= decode.threshold:
        key, value = "threshold", f"{decode.threshold:g}"
        message = f"it leaves nothing out: threshold = {value} is as high"
    else:
        return
    yield Finding(
        path=("decode", "missing_threshold"),
        message=message,
        help="leave missing_threshold out",
        origins=(Origin(document="plan", path=("decode", key), text=f"{key} = {value}"),),
    )
