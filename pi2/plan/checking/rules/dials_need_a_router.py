"""The table ``[experts]`` deviates from routing where a router says what is read.

Why: ``prefer_cached``, ``least_weight``, ``read_best`` and ``most_reads`` choose among the experts
that a router names.  With another predictor, or in a model without experts, they do nothing.
``prefer_cached`` compares scores, and knows of no others than a plain softmax or sigmoid: groups of
experts, biases that only choose, and a mixer are refused.

Example: ``least_weight = 0.05`` beside ``predictor = "low-rank"``.

Fix: ``decode.predictor = "router"``, or leave the table out.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.model_experts import Moe

CODE = "P279"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for dials that turn nothing."""
    experts, moe = facts.plan.experts, facts.model.moe
    if not experts.is_lossy:
        return
    dial = "prefer_cached" if experts.prefer_cached else "least_weight"
    if not (experts.prefer_cached or experts.least_weight):
        dial = "most_reads" if experts.most_reads is not None else "layers"
        dial = dial if experts.read_best is None else "read_best"
    if facts.plan.decode.predictor != "router":
        yield Finding(
            path=("experts", dial),
            message=f"{dial} does nothing with predictor = "
            f'"{facts.plan.decode.predictor}": no router names what is read',
            help='write decode.predictor = "router", or leave the table [experts] out',
            origins=(
                Origin(
                    document="plan",
                    path=("decode", "predictor"),
                    text=f'predictor = "{facts.plan.decode.predictor}"',
                ),
            ),
        )
    elif moe is not None and experts.prefer_cached and (key := _find_other_choice(moe)):
        yield Finding(
            path=("experts", "prefer_cached"),
            message=f"experts cannot be preferred: the model chooses them otherwise ({key})",
            help="leave prefer_cached out; least_weight, read_best and most_reads work",
            origins=(Origin(document="model", path=("moe", key), text="it is said here"),),
        )


def _find_other_choice(moe: Moe) -> str | None:
    """The key by which experts are chosen by more than their scores; None if there is none."""
    others = {
        "router": moe.router == "mixer",
        "choice_bias": moe.choice_bias,
        "groups": moe.groups > 1,
    }
    return next((key for key, differs in others.items() if differs), None)
