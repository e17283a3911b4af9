"""A plan on its device in plain numbers, which the planner adds up and the simulator runs.
Documents are read only here and in the modules that it calls.

A unit with the whole model in its own memory takes the processor's place: a step takes its bytes at
the rate of that memory, and a fixed time for every kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pi2.costs.activity import (
    Described,
    LayerActivity,
    describe_activity,
    describe_cut_activity,
    describe_routing,
    describe_target_activity,
)
from pi2.costs.constants import Constants, Figure
from pi2.costs.cost_layer import cost_layer
from pi2.costs.kernel_times import Rates
from pi2.costs.prompts import PromptSettings, read_prompt_settings
from pi2.costs.rates import read_rates, read_whole_rates
from pi2.costs.settings import POSITION, Settings, read_settings, share_cold
from pi2.costs.terms import LayerKind, time_head, time_row
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_read_rows


def list_dense_units(resolved: ResolvedPlan) -> list[str]:
    """Units that compute densely in steps of ``decode.batch`` sequences."""
    batch = resolved.plan.decode.batch
    return list(
        dict.fromkeys(
            layer.dense.unit
            for layer in resolved.layers
            if layer.dense is not None and layer.find_dense_share(batch) > 0.0
        )
    )


def list_used_units(resolved: ResolvedPlan) -> list[str]:
    """Units next to the processor that compute anything: neurons, rows of projections, prompts."""
    rows, prompts = resolved.divided_rows, resolved.plan.prefill.unit
    others = [] if rows is None else [rows.unit]
    others += [] if prompts in (None, resolved.sparse_unit) else [str(prompts)]
    return list(dict.fromkeys((*list_dense_units(resolved), *others)))


def _list_assumptions(resolved: ResolvedPlan, rates: Rates) -> tuple[str, ...]:
    """A sentence for each difference between prediction and engine."""
    known = None if rates.dense is None else rates.dense.name
    sparse, prompts = resolved.sparse_unit, resolved.plan.prefill.unit
    units = list_dense_units(resolved)
    found = []
    if prompts not in (None, sparse, known):
        found.append(f"{sparse} computes prompts; {prompts} does in pi2's engine")
    rows = resolved.divided_rows
    if rows is not None and rows.unit != known:
        found.append(f"{sparse} computes all projections; {rows.unit} has rows of them in the plan")
    if units and prompts is None and not resolved.device.units[units[0]].memory:
        found.append(
            f"{sparse} computes whole prompts; in pi2's engine {units[0]} computes the neurons "
            "that it keeps"
        )
    takes = "no time, the device has no rates of it" if known is None else f"{known}'s time"
    return (*found, *(f"{name} takes {takes}" for name in units if name != known))


_READING_WEIGHT = 3.0
"""A processor is slowest if a third of the time of reads and token is reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """All that a prediction needs."""

    name: str
    digest: str
    kinds: tuple[LayerKind, ...]
    prompts: PromptSettings
    is_smooth: bool = False
    """Whether neurons that do little are never quite zero."""
    embedding_s: float = 0.0
    """Seconds to read an embedding row if rows are not resident."""
    activity_source: str = ""
    figures: tuple[Figure, ...] = ()
    """Figures of documents that it comes from."""
    assumptions: tuple[str, ...] = ()
    """Differences from the engine, a sentence each."""
    ends: tuple[Description, Description] | None = None
    """The same with all rates low, and high; None if not asked for."""

    @property
    def rates(self) -> Rates:
        return self.kinds[0].rates

    @property
    def settings(self) -> Settings:
        """Settings of layers whose neurons are predicted, if any are."""
        return next((kind for kind in self.kinds if not kind.is_whole), self.kinds[0]).settings

    @property
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def head_s(self) -> float:
        return time_head(self.rates, self.settings)

    @property
    def uses_dense(self) -> bool:
        """Whether a unit computes neurons densely next to the processor."""
        return self.rates.dense is not None and any(kind.dense_share > 0.0 for kind in self.kinds)

    def change_kinds(self, change: Callable[[LayerKind], LayerKind]) -> Description:
        return replace(self, kinds=tuple(map(change, self.kinds)))

    def find_core_share(self) -> float:
        """Part of its speed that the processor keeps: the less, the longer a token reads."""
        most = 1.0 - self.rates.core_share
        if most <= 0.0 or all(kind.hot >= 1.0 for kind in self.kinds):
            return 1.0
        costs = [(kind.count, cost_layer(kind)) for kind in self.kinds]
        read_s = sum(count * cost.read_s for count, cost in costs)
        token_s = self.head_s + sum(count * cost.total_s for count, cost in costs)
        return 1.0 - most * min(1.0, _READING_WEIGHT * read_s / (read_s + token_s))

    def count_statuses(self) -> Mapping[str, int]:
        return Counter(figure.status for figure in self.figures)


def read_plan_rates(resolved: ResolvedPlan, constants: Constants | None = None) -> Rates:
    """Rates of the units that a plan uses; UserError P351 names missing figures."""
    for unit in resolved.source.whole_units:
        return read_whole_rates(resolved.device, unit, constants)
    width, units = resolved.model.shape.stored_hidden, list_used_units(resolved)
    return read_rates(resolved.device, width, constants, unit=units[0] if units else None)


def describe_plan(
    resolved: ResolvedPlan,
    rates: Rates | None = None,
    *,
    store: Path | None = None,
    activity: Described | None = None,
    position: int = POSITION,
) -> Description:
    """Describe a plan in plain numbers; UserError P351 names missing figures of the device."""
    resolved = resolved.source.see_experts(resolved)
    plan, model = resolved.plan, resolved.model
    rates = read_plan_rates(resolved) if rates is None else rates
    rates = rates.choose(plan.kv.type, plan.decode.activations)
    mode, batch = plan.decode.predictor, plan.decode.batch
    if activity is None and mode == "gate" and resolved.thresholds is not None:
        activity = describe_cut_activity(model, resolved.thresholds, batch=batch)
    elif activity is None and mode == "gate" and plan.sparsity is not None and plan.sparsity.target:
        activity = describe_target_activity(model, plan.sparsity.target, batch=batch)
    elif activity is None:
        activity = describe_activity(model, mode, store, rates.constants, batch=batch)
    own = list(rates.figures)
    if model.sparsity is not None and mode not in ("none", "router"):
        sparsity = model.sparsity
        own.append(Figure(name="sparsity", status=sparsity.status, source=sparsity.source))
    if mode == "low-rank" and model.predictor is not None and model.predictor.active is not None:
        own.append(Figure(name="predictor.active", status="estimated", source="model document"))
    described = _describe(resolved, rates, activity, store, position)
    described = replace(described, figures=tuple(dict.fromkeys(own)))
    share = described.find_core_share()
    if share == 1.0:
        return described
    slow = _describe(resolved, rates.slow_cores(share), activity, store, position)
    return replace(slow, figures=described.figures)


def describe_range(resolved: ResolvedPlan, rates: Rates | None = None, **known: Any) -> Description:
    """The description with its ends; ``known`` as for `describe_plan`."""
    rates = read_plan_rates(resolved) if rates is None else rates
    low, expected, high = (
        describe_plan(resolved, own, **known)
        for own in (rates.vary("low"), rates, rates.vary("high"))
    )
    return replace(expected, ends=(low, high))


def _describe(
    resolved: ResolvedPlan, rates: Rates, activity: Described, store: Path | None, position: int
) -> Description:
    plan, model, (uses, source) = resolved.plan, resolved.model, activity
    kinds = _group_layers(resolved, rates, uses, store, position)
    return Description(
        name=plan.name or resolved.path.name,
        digest=resolved.digest if resolved.path.name else "",
        kinds=kinds,
        prompts=read_prompt_settings(resolved, rates, kinds[0].sizes),
        is_smooth=model.is_smooth,
        embedding_s=count_read_rows(plan, model) * time_row(rates, model),
        activity_source=source,
        assumptions=_list_assumptions(resolved, rates),
    )


def _group_layers(
    resolved: ResolvedPlan,
    rates: Rates,
    uses: tuple[LayerActivity, ...],
    store: Path | None,
    position: int,
) -> tuple[LayerKind, ...]:
    model, batch = resolved.model, resolved.plan.decode.batch
    routes: tuple[LayerActivity | None, ...] = (None,) * model.shape.layers
    if model.moe is not None:
        routes = describe_routing(model, store, rates.constants)[0]
    colds = share_cold(resolved, position)
    kinds: dict[tuple[int, int, float, float, float], list[int]] = {}
    for number, layer in enumerate(resolved.layers):
        shares = (layer.hot, colds[number], layer.find_dense_share(batch))
        key = (id(uses[number]), id(routes[number]), *shares)
        kinds.setdefault(key, []).append(number)
    named = frozenset(resolved.named_layers)
    settings = {
        is_named: read_settings(resolved, rates, position, store, named=is_named)
        for is_named in {numbers[0] in named for numbers in kinds.values()}
    }
    return tuple(
        LayerKind(
            rates=rates,
            settings=settings[numbers[0] in named],
            activity=uses[numbers[0]],
            hot=hot,
            cold=cold,
            dense=dense,
            layers=tuple(numbers),
            routing=routes[numbers[0]],
        )
        for (_, _, hot, cold, dense), numbers in kinds.items()
    )
