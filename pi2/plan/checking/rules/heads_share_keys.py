"""The number of heads is a multiple of the number of key and value heads.

Why: in grouped-query attention each key and value head serves the same number of query heads.

Example: ``heads = 8`` with ``kv_heads = 3``.

Fix: take both numbers from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P240"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Divide heads by kv_heads."""
    shape = facts.model.shape
    if shape.heads % shape.kv_heads == 0:
        return
    yield Finding(
        document="model",
        path=("shape", "kv_heads"),
        message=f"{shape.heads} heads cannot share {shape.kv_heads} key and value heads evenly",
        help="take heads and kv_heads from the checkpoint's configuration",
        origins=(Origin(document="model", path=("shape", "heads"), text=f"heads = {shape.heads}"),),
    )
