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
        message = f"missing_threshold has no effect with predictor = {value}: it compares scores"
    elif decode.missing_threshold <= decode.threshold:
        key, value = "threshold", f"{decode.threshold:g}"
        own = f"{decode.missing_threshold:g}"
        message = f"missing_threshold = {own} has no effect: it must be above threshold = {value}"
    else:
        return
    yield Finding(
        path=("decode", "missing_threshold"),
        message=message,
        help="remove missing_threshold, or "
        + ("raise it" if key == "threshold" else 'write predictor = "low-rank"'),
        origins=(Origin(document="plan", path=("decode", key), text=f"{key} = {value}"),),
    )
