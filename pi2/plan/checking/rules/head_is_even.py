"""The width of a head is even.

Why: rotary positions turn pairs of elements, one from each half of a head.

Example: ``head_dim = 33``.

Fix: take the number from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P241"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Divide head_dim by two."""
    model, other = facts.model, facts.model.other_heads
    heads = {"shape": (model.turned_width, model.shape.head_dim)}
    if other is not None:
        heads["other_heads"] = (other.head_dim, other.head_dim)
    for table, (turned, width) in heads.items():
        if turned % 2:
            yield Finding(
                document="model",
                path=(table, "head_dim"),
                message=f"a head of {width} elements has no two halves to rotate",
                help="take head_dim from the checkpoint's configuration",
            )
