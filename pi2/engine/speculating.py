"""Speculation as a plan wants it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pi2.backends.protocol import StateKeeper
from pi2.engine.drafting import Drafter, PromptLookup
from pi2.engine.forward import Forward
from pi2.engine.parts import Parts
from pi2.engine.payback import Touched
from pi2.engine.plan_drafts import PlanDrafts
from pi2.engine.resident_drafts import ResidentDrafts
from pi2.engine.speculation import Speculation
from pi2.engine.step_bytes import FileStepBytes, StepBytes
from pi2.engine.whole_forward import WholeForward


def make_speculation(parts: Parts) -> Speculation | None:
    """Make what guesses tokens; None where the plan wants none, or states cannot be copied."""
    plan, forward = parts.resolved.plan, parts.forward
    settings = plan.decode.speculation
    if settings is None:
        return None
    if isinstance(forward, WholeForward) and parts.resolved.file is not None:
        return Speculation(
            PromptLookup(settings.match),
            tokens=settings.tokens,
            step_tokens=plan.decode.step_tokens,
            count_bytes=FileStepBytes(parts, forward).count,
            always=settings.when == "always",
        )
    if not isinstance(forward, Forward):
        return None
    if parts.resolved.model.state_layers and not isinstance(parts.executor, StateKeeper):
        return None
    drafter: Drafter = PromptLookup(settings.match)
    if settings.drafts == "resident":
        drafter = ResidentDrafts(forward, parts.feed_forward)
    count = StepBytes(parts, forward).count
    if settings.drafts == "plan":
        if parts.draft is None or not isinstance(parts.draft.forward, Forward):
            return None
        drafter = PlanDrafts(parts.draft.forward, parts.draft.resolved.plan.kv.context)
        count = partial(_add_counts, count, StepBytes(parts.draft, parts.draft.forward).count)
    return Speculation(
        drafter,
        tokens=settings.tokens,
        step_tokens=plan.decode.step_tokens,
        count_bytes=count,
        always=settings.when == "always",
    )


def _add_counts(own: Callable[[], Touched], other: Callable[[], Touched]) -> Touched:
    """What both models have touched."""
    mine, theirs = own(), other()
    return Touched(mine.memory + theirs.memory, mine.flash + theirs.flash)
