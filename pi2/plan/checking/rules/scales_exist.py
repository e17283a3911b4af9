"""Scales are resident only where weights have scales.

Why: int4 and int8 have a scale for every 32 weights; fp16 weights stand for themselves, so that
there is nothing that could lie elsewhere.

Example: ``scales = "resident"`` for a model with ``quantization.ffn = "fp16"``.

Fix: leave ``bundle.scales`` out, or quantise the neurons.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P223"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Look for scales in neurons that have none."""
    if facts.plan.bundle.scales == "resident" and facts.model.quantization.ffn == "fp16":
        path = ("quantization", "ffn")
        yield Finding(
            path=("bundle", "scales"),
            message="neurons of fp16 have no scales that could be resident",
            help='write scales = "inline"',
            origins=(Origin(document="model", path=path, text='ffn = "fp16"'),),
        )
