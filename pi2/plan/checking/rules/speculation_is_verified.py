"""Guessed tokens are verified by a unit that computes layer by layer.

Why: tokens that were guessed go through the model together, and those that are not kept are taken
back; a unit that has the whole model in its own memory takes one token of each sequence at a time.

Example: ``decode.speculation = {}`` with ``layers.split = { gpu = 1.0 }``.

Fix: remove ``decode.speculation``, or give some of the neurons to a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P281"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for a unit that has the whole model."""
    resolved = facts.resolved
    if resolved.plan.decode.speculation is None or not resolved.has_whole_unit:
        return
    yield Finding(
        path=("decode", "speculation"),
        at="key",
        message=f"{resolved.sparse_unit!r} has the whole model, and verifies no guesses",
        help="remove speculation, or give some of the neurons to a CPU",
    )
