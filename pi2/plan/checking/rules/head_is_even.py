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
    if facts.model.turned_width % 2 == 0:
        return
    yield Finding(
        document="model",
        path=("shape", "head_dim"),
        message=f"a head of {facts.model.shape.head_dim} elements has no two halves to rotate",
        help="take head_dim from the checkpoint's configuration",
    )
