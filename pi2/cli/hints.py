"""The one setting that would help a run most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.fitting.sizes import find_needs

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel
    from pi2.plan.arithmetic.resolved import ResolvedPlan

MORE = 1.1
"""Memory that is worth a word: so many times what the plan has."""


def find_hint(model: LoadedModel, bound: str | None) -> str | None:
    """What to try next; None if nothing is known that helps."""
    from pi2.engine.statistics import read_peak_rss_bytes
    from pi2.machine import detect_machine

    resolved, machine = model.plan, detect_machine()
    if bound == "disk":
        room = machine.memory.available_bytes + read_peak_rss_bytes()
        return hint_reads(resolved, room)
    threads = resolved.plan.threads.compute
    if bound is not None and threads is not None and threads < machine.cores:
        return f"--set threads.compute={machine.cores} uses all {machine.cores} cores"
    return None


def hint_reads(resolved: ResolvedPlan, room_bytes: int) -> str | None:
    """What makes reads fewer on a machine that has ``room_bytes`` for the process."""
    from pi2.plan.arithmetic.sizes import count_ffn_bytes
    from pi2.plan.documents.quantities import write_least, write_most

    plan, model = resolved.plan, resolved.model
    if resolved.file is not None:
        whole = plan.memory.budget + resolved.file.missing_bytes * 33 // 32
        if whole <= room_bytes:
            return f"--memory '{write_least(whole)}' keeps all weights in memory"
        more = room_bytes > MORE * plan.memory.budget
        return f"--memory '{write_most(room_bytes)}' keeps more weights in memory" if more else None
    kept = find_needs(resolved).hot.bytes + plan.memory.segments.cold
    missing = max(0, count_ffn_bytes(resolved) - kept)
    whole = plan.memory.budget + missing + missing // 32
    if missing and whole <= room_bytes and fits(resolved, whole):
        return f"--memory '{write_least(whole)}' keeps all neurons in memory"
    if plan.decode.predictor == "router" and plan.decode.look_ahead == "none":
        return "--set decode.look_ahead=layer reads experts before they are needed"
    if missing and room_bytes > MORE * plan.memory.budget:
        share = min(1.0, (kept + room_bytes - plan.memory.budget) / count_ffn_bytes(resolved))
        return f"--memory '{write_most(room_bytes)}' keeps {share:.0%} of the neurons in memory"
    if model.is_smooth and model.moe is None and resolved.thresholds is None:
        return "`pi2 sparsity calibrate PLAN --text FILE` finds neurons that need not be read"
    return None


def fits(resolved: ResolvedPlan, budget_bytes: int) -> bool:
    """Whether the plan can be fitted to a budget."""
    from pi2.diagnostics import UserError
    from pi2.refit import refit_plan

    try:
        refit_plan(resolved, budget_bytes)
    except UserError:
        return False
    return True
