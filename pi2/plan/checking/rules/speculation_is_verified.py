"""Guessed tokens are verified by a unit that computes layer by layer, and guessed more cheaply.

Why: tokens that were guessed go through the model together, and those that are not kept are taken
back; a unit that has the whole model in its own memory takes one token of each sequence at a time.
Guesses of what is in memory (``drafts = "resident"``) leave out neurons that a predictor or a
router names and that are missing; without one, every neuron computes, and so it does in layers
without a cutoff, where gates with cutoffs name those of others.

Example: ``decode.speculation = {}`` with ``layers.split = { gpu = 1.0 }``, or with
``drafts = "resident"`` and ``decode.predictor = "none"``.

Fix: remove ``decode.speculation``, give some of the neurons to a CPU, or take another kind of
``drafts``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P281"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for a unit that has the whole model."""
    resolved = facts.resolved
    decode = resolved.plan.decode
    if decode.speculation is None:
        return
    if decode.speculation.drafts == "resident" and resolved.whole_layers:
        yield Finding(
            path=("decode", "speculation", "drafts"),
            message="guesses leave nothing out: every neuron computes"
            + (f" in {len(resolved.whole_layers)} layers" if resolved.named_layers else ""),
            help='write drafts = "prompt", or choose another decode.predictor',
            origins=(
                Origin(
                    document="plan",
                    path=("decode", "predictor"),
                    text=f'predictor = "{decode.predictor}"',
                ),
            ),
        )
    if not resolved.has_whole_unit:
        return
    yield Finding(
        path=("decode", "speculation"),
        at="key",
        message=f"{resolved.sparse_unit!r} has the whole model, and verifies no guesses",
        help="remove speculation, or give some of the neurons to a CPU",
    )
