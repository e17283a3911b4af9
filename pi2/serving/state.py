"""What the page shows beside the chat: what models do, and what memory they have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pi2.engine.statistics import read_peak_rss_bytes
from pi2.serving.host import Host


def describe_state(hosts: Iterable[Host]) -> dict[str, Any]:
    """Counters of all models, as they are now: the page takes differences."""
    return {
        "peak_memory_bytes": read_peak_rss_bytes(),
        "models": [_describe(host) for host in hosts],
    }


def _describe(host: Host) -> dict[str, Any]:
    if not host.is_loaded:
        return {"name": host.plan.name, "loaded": False, "waiting": host.waiting}
    model = host.model
    plan, scheduler = model.plan.plan, model.scheduler
    return {
        "name": host.plan.name,
        "loaded": True,
        "plan": model.plan.digest[:12],
        "context": plan.kv.context,
        "places": scheduler.places,
        "running": scheduler.running,
        "waiting": scheduler.waiting + host.waiting,
        "context_use": round(scheduler.measure_context_use(), 4),
        "rounds": scheduler.rounds.describe(),
        "statistics": asdict(model.stats),
        "budget_bytes": plan.memory.budget,
        "segments": dict(plan.memory.segments),
        "units": [
            {
                "name": unit.name,
                "owned_share": unit.owned_share,
                "computed_neurons": unit.computed_neurons,
                "busy_s": unit.busy_s,
                "lost": unit.lost,
            }
            for unit in model.units
        ],
        "sparse_unit": model.plan.sparse_unit,
        "io_engine": model.io_engine,
        "sampling": dict(plan.sampling),
    }
