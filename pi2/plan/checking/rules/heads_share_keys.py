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
    shape, other = facts.model.shape, facts.model.other_heads
    stated = {"shape": (shape.heads, shape.kv_heads)}
    if other is not None:
        stated["other_heads"] = (other.heads or shape.heads, other.kv_heads)
    for table, (count, kv_heads) in stated.items():
        if count % kv_heads == 0:
            continue
        owner = table if table == "shape" or (other and other.heads) else "shape"
        heads = Origin(document="model", path=(owner, "heads"), text=f"heads = {count}")
        yield Finding(
            document="model",
            path=(table, "kv_heads"),
            message=f"{count} heads cannot share {kv_heads} key and value heads evenly",
            help="take heads and kv_heads from the checkpoint's configuration",
            origins=(heads,),
        )
