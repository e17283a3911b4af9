"""The plan of a model that guesses tokens is one that can: same tokens, and room for both.

Why: a guess is a token of the model that verifies it, so that both need the same vocabulary; what
was guessed and not kept is taken back, which layers with a state cannot; and the budget is a
promise for the whole process.

Example: ``drafts = "plan"`` without ``plan``, or with one whose model has another vocabulary.

Fix: name the plan of a smaller model of the same family, without speculation of its own, on the
``cpu`` backend, and leave room for its segments in ``memory.budget``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.quantities import approximate_bytes

CODE = "P284"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare both plans."""
    resolved = facts.resolved
    settings = resolved.plan.decode.speculation
    if settings is None:
        return
    if (settings.drafts == "plan") != (settings.plan is not None):
        is_unnamed = settings.plan is None
        yield Finding(
            path=("decode", "speculation", "drafts" if is_unnamed else "plan"),
            message="no plan is named" if is_unnamed else "nobody guesses with this plan",
            help='write plan = "./draft.plan.toml" and drafts = "plan", or neither',
        )
        return
    if resolved.draft is None:
        return
    for message, help in _list_obstacles(resolved, resolved.draft):
        yield Finding(path=("decode", "speculation", "plan"), message=message, help=help)


def _list_obstacles(resolved: ResolvedPlan, draft: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """What keeps a plan from guessing, and what to do about it."""
    own, other = resolved.model.shape.vocab, draft.model.shape.vocab
    if own != other:
        yield (
            f"its model has a vocabulary of {other} tokens, and this one of {own}",
            "name the plan of a model with the same tokenizer",
        )
    if draft.plan.decode.speculation is not None:
        yield "it speculates itself", "remove decode.speculation from it"
    if draft.model.state_layers:
        yield (
            "its model has layers with a state, which cannot be taken back",
            "name the plan of a model with attention in every layer",
        )
    if draft.has_whole_unit:
        yield (
            f"its unit {draft.sparse_unit!r} has the whole model",
            "give its neurons to a CPU",
        )
    memory = resolved.plan.memory
    free = memory.budget - sum(dict(memory.segments).values())
    segments = draft.plan.memory.segments
    needed = sum(dict(segments).values()) - segments.runtime
    if needed > free:
        yield (
            f"it needs {approximate_bytes(needed)} beside this plan's segments, and memory.budget "
            f"leaves {approximate_bytes(max(0, free))}",
            "raise memory.budget, or make segments of one of both smaller",
        )
