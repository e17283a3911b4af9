"""Position scaling is complete and has an effect.

Why: ``plain`` positions ignore ``factor``; ``llama3`` scales between two wavelengths, whose
factors must be in order.

Example: ``kind = "plain"`` with ``factor = 4.0``.

Fix: take kind and factors from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.findings import Facts, Finding, Origin

CODE = "P248"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare kind and factors."""
    rope = facts.model.rope
    if rope.kind == "plain" and rope.factor != 1.0:
        yield Finding(
            document="model",
            path=("rope", "factor"),
            message=f"plain positions ignore the factor {rope.factor:g}",
            help='write kind = "linear" or "llama3", or remove the factor',
            origins=(Origin(document="model", path=("rope", "kind"), text='kind = "plain"'),),
        )
    if rope.kind == "llama3" and rope.high_frequency_factor <= rope.low_frequency_factor:
        yield Finding(
            document="model",
            path=("rope", "high_frequency_factor"),
            message=f"high_frequency_factor is {rope.high_frequency_factor:g}, expected more than "
            f"low_frequency_factor, {rope.low_frequency_factor:g}",
        )
