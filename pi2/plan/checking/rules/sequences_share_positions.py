"""Tokens that are generated at the same time compute their positions in one way.

Why: the positions of LongRoPE are computed otherwise in a sequence that is longer than the model's
original context; several sequences at a time, or tokens that are verified together, share one
table of them.

Example: ``decode.batch = 4`` and a context of 8,192 tokens for a model whose original context has
4,096.

Fix: set ``kv.context`` to the original context at most, or ``decode.batch = 1`` without
``decode.speculation``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P322"
SEVERITY = "error"
NEEDS = ("plan", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the context with those up to which short sequences go."""
    decode, context = facts.plan.decode, facts.plan.kv.context
    if decode.step_tokens == 1:
        return
    batch, guesses = decode.batch, decode.batch == 1
    for table in ("rope", "other_rope"):
        rope = getattr(facts.model, table)
        if rope is None or rope.kind != "longrope" or context <= rope.original_context:
            continue
        original = f"original_context = {rope.original_context}"
        yield Finding(
            path=("decode", "speculation" if guesses else "batch"),
            message=f"the plan generates {f'{batch} sequences' if batch > 1 else 'several tokens'} "
            "at a time, and the model's positions "
            f"differ between sequences of up to {rope.original_context} tokens and longer ones",
            help=("remove it" if guesses else "write batch = 1")
            + f", or set kv.context to {rope.original_context} at most",
            origins=(
                Origin(document="plan", path=("kv", "context"), text=f"context = {context}"),
                Origin(document="model", path=(table, "original_context"), text=original),
            ),
        )
