"""Position scaling is complete and has an effect.

Why: ``plain`` positions ignore ``factor``; ``llama3`` scales between two wavelengths, ``yarn``
between two numbers of rotations, which must be in order; elements turn in pairs, of which each has
its factors with ``longrope``.

Example: ``kind = "plain"`` with ``factor = 4.0``.

Fix: take kind and factors from the checkpoint's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.model_attention import Rope

CODE = "P248"
SEVERITY = "error"
NEEDS = ("model",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare kind and factors."""
    for (is_other, width), rope in facts.model.list_turns().items():
        yield from _check_rope("other_rope" if is_other else "rope", rope, width)


def _check_rope(table: str, rope: Rope, head_dim: int) -> Iterator[Finding]:
    kind = Origin(document="model", path=(table, "kind"), text=f'kind = "{rope.kind}"')
    if rope.kind in ("plain", "none") and rope.factor != 1.0:
        subject = "plain positions ignore" if rope.kind == "plain" else "no rotation ignores"
        yield Finding(
            document="model",
            path=(table, "factor"),
            message=f"{subject} the factor {rope.factor:g}",
            help='write kind = "linear" or "llama3", or remove the factor',
            origins=(kind,),
        )
    if rope.kind == "yarn" and rope.fast_rotations <= rope.slow_rotations:
        yield Finding(
            document="model",
            path=(table, "fast_rotations"),
            message=f"fast_rotations is {rope.fast_rotations:g}, expected more than "
            f"slow_rotations, {rope.slow_rotations:g}",
        )
    rotated = rope.count_rotated(head_dim)
    if rope.share < 1.0 and (rotated == 0 or rotated % 2):
        yield Finding(
            document="model",
            path=(table, "share"),
            message=f"{rotated} elements of a head are rotated, expected an even number",
            help="take the share from the checkpoint's configuration",
        )
    pairs = rotated // 2 if rope.kind == "longrope" else 0
    for name in ("short_factors", "long_factors"):
        count = len(getattr(rope, name))
        if count != pairs:
            yield Finding(
                document="model",
                path=(table, name),
                message=f"{count} factors are stated, expected {pairs}",
                help='only kind = "longrope" has them, one for each pair that turns',
                origins=(kind,),
            )
    if rope.kind == "longrope" and rope.original_context < 2:
        yield Finding(
            document="model",
            path=(table, "original_context"),
            message="original_context is 1, expected 2 tokens or more",
        )
    if rope.kind == "llama3" and rope.high_frequency_factor < rope.low_frequency_factor:
        yield Finding(
            document="model",
            path=(table, "high_frequency_factor"),
            message=f"high_frequency_factor is {rope.high_frequency_factor:g}, expected no less "
            f"than low_frequency_factor, {rope.low_frequency_factor:g}",
        )
