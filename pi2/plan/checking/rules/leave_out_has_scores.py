"""``decode.leave_out`` is about scores of low-rank predictors, and the only limit of reads.

Why: what may be left out is a share of the scores that low-rank predictors give.  Other predictors
give none, and with ``missing_threshold`` the limit is stated already, so that none can be found.

Example: ``leave_out = 0.02`` with ``missing_threshold = 1.0``.

Fix: ``leave_out`` alone, with ``predictor = "low-rank"``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P292"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the settings of decoding."""
    decode = facts.plan.decode
    if decode.leave_out is None:
        return
    if decode.predictor != "low-rank":
        key, value = "predictor", f'"{decode.predictor}"'
        message = f"leave_out has no effect with predictor = {value}: it leaves out scores"
    elif decode.missing_threshold is not None:
        key, value = "missing_threshold", f"{decode.missing_threshold:g}"
        message = f"leave_out and missing_threshold = {value} exclude each other"
    else:
        return
    yield Finding(
        path=("decode", "leave_out"),
        message=message,
        help='remove leave_out, or write predictor = "low-rank"'
        if key == "predictor"
        else "remove one: leave_out states a quality, missing_threshold a score",
        origins=(Origin(document="plan", path=("decode", key), text=f"{key} = {value}"),),
    )
