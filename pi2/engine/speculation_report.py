"""What guessing tokens has brought to a run, for machines and for people."""

from __future__ import annotations

from typing import Any

from pi2.engine.loaded_model import LoadedModel
from pi2.engine.speculation_counters import SpeculationCounters
from pi2.engine.statistics import divide
from pi2.plan.documents.quantities import approximate_bytes


def describe_speculation(
    model: LoadedModel, counters: SpeculationCounters
) -> dict[str, Any] | None:
    """Everything that is known, for machines; None where the plan guesses nothing."""
    if model.scheduler.speculation is None:
        return None
    return {
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted_tokens": counters.accepted_tokens,
        "accepted_by_position": list(counters.accepted_by_position),
        "drafted_steps": counters.drafted_steps,
        "drafted_tokens": counters.drafted_tokens,
        "drafted_bytes_per_token": _round(divide(counters.drafted_bytes, counters.drafted_tokens)),
        "drafted_flash_bytes_per_token": _round(
            divide(counters.drafted_flash_bytes, counters.drafted_tokens)
        ),
        "plain_tokens": counters.plain_tokens,
        "plain_bytes_per_token": _round(divide(counters.plain_bytes, counters.plain_tokens)),
        "plain_flash_bytes_per_token": _round(
            divide(counters.plain_flash_bytes, counters.plain_tokens)
        ),
    }


def summarise_speculation(found: dict[str, Any]) -> str:
    """A line for people."""
    drafted, plain = found["drafted_bytes_per_token"], found["plain_bytes_per_token"]
    if not found["draft_tokens"]:
        return "speculation: nothing was guessed"
    share = found["accepted_tokens"] / found["draft_tokens"]
    line = (
        f"speculation: {found['draft_tokens']} tokens guessed, {share:.1%} of them kept · "
        f"{found['drafted_tokens'] / found['drafted_steps']:.2f} tokens a step, "
        f"{approximate_bytes(drafted)} touched for each, "
        f"{approximate_bytes(found['drafted_flash_bytes_per_token'])} of it on flash"
    )
    if plain is not None:
        line += (
            f"; without guesses {approximate_bytes(plain)}, "
            f"{approximate_bytes(found['plain_flash_bytes_per_token'])} of it on flash "
            f"({found['plain_tokens']} tokens)"
        )
    return line


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)
