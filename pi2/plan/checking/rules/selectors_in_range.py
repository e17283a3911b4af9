"""Selectors name layers that the model has, in ascending order.

Why: a number beyond the model's last layer, or a range whose end lies before its start, selects
nothing; what was meant is unclear.

Example: ``select = "6-8"`` for a model with 8 layers, which are numbered 0 to 7; ``"7-4"``.

Fix: correct the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.selectors import parse_selector

CODE = "P212"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Check every range of every selector."""
    count = facts.model.shape.layers
    tables = [
        (("layers", "overrides", number, "select"), item.select)
        for number, item in enumerate(facts.plan.layers.overrides)
    ] + [
        (("experts", "layers", number, "select"), item.select)
        for number, item in enumerate(facts.plan.experts.layers)
    ]
    for path, selector in tables:
        for first, last in parse_selector(selector):
            if first > last:
                yield Finding(
                    path=path,
                    message=f"the range {first}-{last} is reversed and selects nothing",
                    help=f'write "{last}-{first}"',
                )
            elif last >= count:
                yield Finding(
                    path=path,
                    message=f"there is no layer {last}: the model has the layers 0 to {count - 1}",
                    help=f'write "{first}-{count - 1}"' if first < count - 1 else None,
                    origins=(
                        Origin(
                            document="model", path=("shape", "layers"), text=f"layers = {count}"
                        ),
                    ),
                )
