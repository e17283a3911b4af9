"""The context is not longer than the model's.

Why: beyond the length that a model was trained for its positions mean nothing to it, and its
text falls apart.

Example: ``kv.context = 4096`` for a model with ``context = 2048``.

Fix: lower ``kv.context``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P231"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the two contexts."""
    wanted, known = facts.plan.kv.context, facts.model.shape.context
    if wanted <= known:
        return
    yield Finding(
        path=("kv", "context"),
        message=f"context {wanted} exceeds the limit of the model `{facts.model.id}`: {known}",
        help=f"write context = {known} or less",
        origins=(Origin(document="model", path=("shape", "context"), text=f"context = {known}"),),
    )
