"""A prefill chunk is not longer than the context.

Why: no prompt is longer than the context, so the rest of the chunk's workspace is never used.

Example: ``prefill.chunk = 512`` with ``kv.context = 256``.

Fix: lower ``prefill.chunk``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P235"
SEVERITY = "warning"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare chunk and context."""
    chunk, context = facts.plan.prefill.chunk, facts.plan.kv.context
    if chunk <= context:
        return
    yield Finding(
        path=("prefill", "chunk"),
        message=f"a chunk of {chunk} tokens is longer than the context of {context}",
        help=f"write chunk = {context}",
        origins=(Origin(document="plan", path=("kv", "context"), text=f"context = {context}"),),
    )
