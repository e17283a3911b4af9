"""Plans that give a card with enough memory of its own the whole model, and the CPU nothing.

A unit that shares main memory is not asked: the processor beside it may read the same weights, and
nobody measured how fast it would be alone.

There is little to choose: everything is in one memory, so that what names a token's neurons and
the type of keys and values are tried, and the cost model decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pi2.costs.cost import Cost, cost_resolved
from pi2.costs.whole_rates import read_whole_rates
from pi2.diagnostics import UserError
from pi2.plan.arithmetic.fitting import MIB, add_runtime, round_segment
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_unit_needs
from pi2.plan.arithmetic.units import describe_unit
from pi2.plan.documents.backends import find_whole_backend, list_usual_backends
from pi2.plan.documents.plan_memory import KvType, Segments
from pi2.plan.documents.plan_running import PredictorMode
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.weights.layout import BundleLayout
from pi2.planning.resolving import make_plan_values, resolve_values
from pi2.planning.wish import Wish

_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """A plan whose GPU or NPU has the whole model."""

    values: dict[str, Any]
    resolved: ResolvedPlan
    cost: Cost


def list_whole_plans(
    wish: Wish, bundle: BundleLayout, predictors: tuple[PredictorMode, ...]
) -> Iterator[WholePlan]:
    """Plans within the wish's memories, one for each unit with memory of its own, way to name
    neurons and type of keys and values; units whose memory's rate nobody states are left out."""
    types: tuple[KvType, ...] = ("fp16",) if wish.exact else ("fp16", "int8")
    usual = list_usual_backends()
    for name, unit in wish.device.units.items():
        backend = usual.get(unit.kind)
        if unit.memory is None or unit.emulated or backend is None:
            continue
        if find_whole_backend(backend) is None:
            continue
        try:
            rates = read_whole_rates(wish.device, name)
        except UserError:
            continue
        for predictor in predictors:
            for kv in types:
                values = make_plan_values(
                    wish, predictor=predictor, kv=kv, chunk=min(_CHUNK, wish.context), bundle=bundle
                )
                values["backends"] = {unit.kind: backend}
                values["layers"] = {"split": {name: 1.0}, "hot": 1.0}
                resolved = _fit(wish, name, values)
                if resolved is None:
                    continue
                cost = cost_resolved(resolved, rates, store=wish.store)
                yield WholePlan(values=values, resolved=resolved, cost=cost)


def _fit(wish: Wish, name: str, values: dict[str, Any]) -> ResolvedPlan | None:
    """Give the plan's memories the sizes that they need; None where that is more than there is, or
    where the backend cannot compute the model."""
    resolved = resolve_values(values, wish.device, wish.model)
    backend = find_whole_backend(resolved.name_backend(name))
    assert backend is not None
    if backend.find_limits(describe_unit(resolved, name)):
        return None
    sizes = {key: round_segment(need.bytes) for key, need in resolved.needs.items()}
    other = sum(sizes.values())
    budget = add_runtime(wish.model, other, resolved.list_unit_kinds())
    sizes["runtime"] = (budget - other) // MIB * MIB
    if wish.memory_bytes is not None and budget > wish.memory_bytes:
        return None
    values["memory"] = {
        "budget": format_bytes(budget),
        "segments": {key: format_bytes(sizes.get(key, 0)) for key in Segments.model_fields},
    }
    need = round_segment(count_unit_needs(resolved)[name].bytes)
    own = wish.device.units[name].memory
    limit = wish.unit_memory.get(name, own.capacity if own is not None else None)
    if limit is None or need > limit:
        return None
    values["memory"]["units"] = {name: {"budget": format_bytes(need)}}
    return resolve_values(values, wish.device, wish.model)
