"""The table ``[twin]`` is of a plan that names neurons, and of a model that can have twins.

Why: what computes instead of a neuron that is not read is its twin, and only a router or a low-rank
predictor names single neurons or experts before they are read.  Twins add up as int4 and int8
neurons do, not as fp16 ones; a code of two bits has no zero, nor has one of three, so that vectors
must be whole numbers of 64 elements, or of 128.

Example: ``[twin]`` beside ``predictor = "gate"``.

Fix: ``decode.predictor = "router"`` or ``"low-rank"``, or leave the table out.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.weights.layout import find_twin_obstacle

CODE = "P290"
SEVERITY = "error"
NEEDS = ("plan", "model", "resolved")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the table with the predictor and the neurons."""
    plan, resolved = facts.plan, facts.resolved
    if plan.twin is None:
        return
    if plan.decode.predictor not in ("router", "low-rank"):
        yield Finding(
            path=("twin",),
            message=f'twins compute nothing with predictor = "{plan.decode.predictor}": nothing '
            "says what is not read",
            help='write decode.predictor = "router" or "low-rank", or leave the table [twin] out',
            origins=(
                Origin(
                    document="plan",
                    path=("decode", "predictor"),
                    text=f'predictor = "{plan.decode.predictor}"',
                ),
            ),
        )
        return
    problem = find_twin_obstacle(resolved.bundle, facts.model.neuron_width, plan.twin.precision)
    if problem is None and resolved.has_whole_unit:
        problem = f"`{resolved.sparse_unit}` has the whole model"
    if problem is not None:
        yield Finding(
            path=("twin",),
            message=f"the neurons can have no twins: {problem}",
            help="leave the table [twin] out",
            origins=(Origin(document="model", path=("shape",), text="of this model"),),
        )
