"""A plan on its device in plain numbers, which the planner adds up and the simulator runs.
Documents are read only here and in the modules that it calls.

A unit with the whole model in its own memory takes the processor's place: a step takes its bytes at
the rate of that memory, and a fixed time for every kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pi2.costs.activity import (
    LayerActivity,
    describe_activity,
    describe_cut_activity,
    describe_routing,
    describe_target_activity,
)
from pi2.costs.constants import Constants, Figure
from pi2.costs.cost_layer import LayerCost, cost_layer
from pi2.costs.kernel_times import Rates
from pi2.costs.prompts import PromptSettings, read_prompt_settings
from pi2.costs.rates import read_rates, read_whole_rates
from pi2.costs.settings import POSITION, Settings, Sizes, measure_sizes, read_settings, share_cold
from pi2.costs.terms import LayerTerms, time_head, time_row
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_read_rows
from pi2.plan.documents.model import Model


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

Activity = tuple[tuple[LayerActivity, ...], str]
"""Activity of every layer, and its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers that are alike."""

    activity: LayerActivity
    hot: float
    """Share of the neurons that stays in memory."""
    cold: float
    """Share that the cache holds."""
    dense: float
    """Share that the dense unit computes."""
    is_whole: bool = False
    """Whether tokens compute all of their neurons."""
    routing: LayerActivity | None = None
    """How a router chooses experts, whose neurons are named or not; None without experts."""
    layers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.layers)

    def count_touched(self, tokens: int) -> float:
        """Neurons of the experts that any of ``tokens`` needs."""
        neurons = self.activity.neurons
        return float(neurons) if self.routing is None else self.routing.count_united(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """All that a prediction needs."""

    name: str
    digest: str
    rates: Rates
    sizes: Sizes
    settings: Settings
    prompts: PromptSettings
    kinds: tuple[LayerKind, ...]
    whole: tuple[Sizes, Settings] | None = None
    """Layers that compute all neurons, if others compute predicted ones."""
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
    def layers(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def head_s(self) -> float:
        return time_head(self.rates, self.sizes, self.settings)

    @property
    def uses_dense(self) -> bool:
        """Whether a unit computes neurons densely next to the processor."""
        return self.rates.dense is not None and any(
            self.find_dense(kind) > 0.0 for kind in self.kinds
        )

    def find_dense(self, kind: LayerKind) -> float:
        """Share of a layer's resident neurons that the dense unit computes."""
        return min(kind.dense, kind.hot)

    def choose(self, kind: LayerKind) -> tuple[Sizes, Settings]:
        if kind.is_whole and self.whole is not None:
            return self.whole
        return self.sizes, self.settings

    def find_terms(self, kind: LayerKind) -> LayerTerms:
        sizes, settings = self.choose(kind)
        return LayerTerms(
            rates=self.rates,
            sizes=sizes,
            settings=settings,
            activity=kind.activity,
            hot=kind.hot,
            cold=kind.cold,
            dense_share=self.find_dense(kind),
        )

    def cost_layer(self, kind: LayerKind) -> LayerCost:
        return cost_layer(self.find_terms(kind))

    def find_core_share(self) -> float:
        """Part of its speed that the processor keeps: the less, the longer a token reads."""
        most = 1.0 - self.rates.core_share
        if most <= 0.0 or all(kind.hot >= 1.0 for kind in self.kinds):
            return 1.0
        costs = [(kind.count, self.cost_layer(kind)) for kind in self.kinds]
        read_s = sum(count * cost.read_s for count, cost in costs)
        token_s = self.head_s + sum(count * cost.total_s for count, cost in costs)
        return 1.0 - most * min(1.0, _READING_WEIGHT * read_s / (read_s + token_s))

    def count_statuses(self) -> Mapping[str, int]:
        return Counter(figure.status for figure in self.figures)


def read_plan_rates(resolved: ResolvedPlan, constants: Constants | None = None) -> Rates:
    """Rates of the units that a plan uses; UserError P351 names missing figures."""
    if resolved.has_whole_unit:
        return read_whole_rates(resolved.device, resolved.sparse_unit, constants)
    width, units = resolved.model.shape.stored_hidden, list_used_units(resolved)
    return read_rates(resolved.device, width, constants, unit=units[0] if units else None)


def describe_plan(
    resolved: ResolvedPlan,
    rates: Rates | None = None,
    *,
    store: Path | None = None,
    activity: Activity | None = None,
    position: int = POSITION,
    constants: Constants | None = None,
) -> Description:
    """Describe a plan in plain numbers; UserError P351 names missing figures of the device."""
    resolved = _see_experts(resolved)
    plan, model = resolved.plan, resolved.model
    rates = read_plan_rates(resolved, constants) if rates is None else rates
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


def _describe(
    resolved: ResolvedPlan, rates: Rates, activity: Activity, store: Path | None, position: int
) -> Description:
    plan, model, (uses, source) = resolved.plan, resolved.model, activity
    mode = plan.decode.predictor
    sizes = measure_sizes(model, mode, plan.kv.type, resolved.bundle)
    whole = None
    if resolved.named_layers and resolved.whole_layers:
        every = measure_sizes(model, "none", plan.kv.type, resolved.bundle)
        whole = every, read_settings(resolved, rates, every, position, store, named=False)
    return Description(
        name=plan.name or resolved.path.name,
        digest=resolved.digest if resolved.path.name else "",
        rates=rates,
        sizes=sizes,
        settings=read_settings(resolved, rates, sizes, position, store),
        prompts=read_prompt_settings(resolved, rates, sizes),
        kinds=_group_layers(resolved, uses, position, _describe_routes(model, store, rates)),
        whole=whole,
        is_smooth=model.is_smooth,
        embedding_s=count_read_rows(plan, model) * time_row(rates, model),
        activity_source=source,
        assumptions=_list_assumptions(resolved, rates),
    )


def _see_experts(resolved: ResolvedPlan) -> ResolvedPlan:
    """The plan of an MoE model's GGUF file as one of a store whose chosen experts are read."""
    plan, file = resolved.plan, resolved.file
    if file is None or resolved.model.moe is None:
        return resolved
    layers = plan.layers.model_copy(update={"hot": 0.0 if file.expert_bytes else 1.0})
    decode = plan.decode.model_copy(update={"predictor": "router"})
    return replace(resolved, plan=plan.model_copy(update={"layers": layers, "decode": decode}))


def _describe_routes(
    model: Model, store: Path | None, rates: Rates
) -> tuple[LayerActivity | None, ...]:
    if model.moe is None:
        return (None,) * model.shape.layers
    return describe_routing(model, store, rates.constants)[0]


def _group_layers(
    resolved: ResolvedPlan,
    uses: tuple[LayerActivity, ...],
    position: int,
    routes: tuple[LayerActivity | None, ...],
) -> tuple[LayerKind, ...]:
    colds = share_cold(resolved, position)
    batch = resolved.plan.decode.batch
    kinds: dict[tuple[int, int, float, float, float], list[int]] = {}
    for number, layer in enumerate(resolved.layers):
        shares = (layer.hot, colds[number], layer.find_dense_share(batch))
        key = (id(uses[number]), id(routes[number]), *shares)
        kinds.setdefault(key, []).append(number)
    named = frozenset(resolved.named_layers)
    return tuple(
        LayerKind(
            activity=uses[numbers[0]],
            hot=hot,
            cold=cold,
            dense=dense,
            is_whole=numbers[0] not in named,
            layers=tuple(numbers),
            routing=routes[numbers[0]],
        )
        for (_, _, hot, cold, dense), numbers in kinds.items()
    )
