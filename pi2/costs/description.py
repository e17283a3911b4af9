"""A plan on its device in plain numbers: what the planner adds up and the simulator plays.

There is one description.  Documents are read here and in the modules that it calls, and nowhere
else; who predicts works with rates, sizes, settings and layers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pi2.costs.activity import (
    LayerActivity,
    describe_activity,
    describe_cut_activity,
    describe_routing,
    describe_target_activity,
)
from pi2.costs.assumptions import list_assumptions, list_dense_units, list_used_units
from pi2.costs.constants import Constants
from pi2.costs.figures import Figure
from pi2.costs.prompts import PromptSettings, read_prompt_settings
from pi2.costs.rates import Rates, read_rates
from pi2.costs.settings import POSITION, Settings, read_settings, share_cold
from pi2.costs.sizes import Sizes, measure_sizes
from pi2.costs.terms import LayerTerms, find_terms, time_head, time_row
from pi2.costs.whole_rates import read_whole_rates
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_read_rows
from pi2.plan.documents.model import Model

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
    """Their numbers."""

    @property
    def count(self) -> int:
        """Number of layers."""
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
    """Those of layers that compute all neurons, where others compute named ones."""
    is_smooth: bool = False
    """Whether neurons that do little are never quite zero."""
    embedding_s: float = 0.0
    """Reading the row of the embedding that a token of one sequence needs, where rows do not
    stay."""
    activity_source: str = ""
    figures: tuple[Figure, ...] = ()
    """Figures of documents that it comes from."""
    assumptions: tuple[str, ...] = ()
    """What is taken to be otherwise than the engine does it, a sentence each."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def head_s(self) -> float:
        """Seconds of a step's output head."""
        return time_head(self.rates, self.sizes, self.settings)

    @property
    def uses_dense(self) -> bool:
        """Whether a unit computes neurons densely beside the processor."""
        return self.rates.dense is not None and any(
            self.find_dense(kind) > 0.0 for kind in self.kinds
        )

    def find_dense(self, kind: LayerKind) -> float:
        """Share of a layer's neurons that the dense unit computes: of those that stay."""
        return min(kind.dense, kind.hot)

    def choose(self, kind: LayerKind) -> tuple[Sizes, Settings]:
        """Sizes and settings of layers of a kind."""
        if kind.is_whole and self.whole is not None:
            return self.whole
        return self.sizes, self.settings

    def find_terms(self, kind: LayerKind) -> LayerTerms:
        """What the steps of a layer of this kind take."""
        sizes, settings = self.choose(kind)
        return find_terms(
            self.rates,
            sizes,
            settings,
            kind.activity,
            hot=kind.hot,
            dense=self.find_dense(kind),
        )

    def count_statuses(self) -> Mapping[str, int]:
        """Number of figures by status."""
        return Counter(figure.status for figure in self.figures)


def describe_plan(
    resolved: ResolvedPlan,
    rates: Rates | None = None,
    *,
    store: Path | None = None,
    activity: Activity | None = None,
    position: int = POSITION,
    constants: Constants | None = None,
) -> Description:
    """Describe a plan; ``UserError`` P351 names the figures that its device lacks.

    ``store`` is the folder of its neuron store; ``activity`` is what `describe_activity` says of
    it, where that is known already.
    """
    plan, model = resolved.plan, resolved.model
    units = list_used_units(resolved)
    if rates is None and resolved.has_whole_unit:
        rates = read_whole_rates(resolved.device, resolved.sparse_unit, constants)
    elif rates is None:
        width = model.shape.stored_hidden
        rates = read_rates(resolved.device, width, constants, unit=units[0] if units else None)
    rates = rates.choose(plan.kv.type, plan.decode.activations)
    if any(layer.hot < 1.0 for layer in resolved.layers):
        rates = rates.warm_up()
    mode, batch = plan.decode.predictor, plan.decode.batch
    if activity is None and mode == "gate" and resolved.thresholds is not None:
        activity = describe_cut_activity(model, resolved.thresholds, batch=batch)
    elif activity is None and mode == "gate" and plan.sparsity is not None and plan.sparsity.target:
        activity = describe_target_activity(model, plan.sparsity.target, batch=batch)
    elif activity is None:
        activity = describe_activity(model, mode, store, rates.constants, batch=batch)
    uses, source = activity
    sizes = measure_sizes(model, mode, plan.kv.type, resolved.bundle)
    whole = None
    if resolved.named_layers and resolved.whole_layers:
        every = measure_sizes(model, "none", plan.kv.type, resolved.bundle)
        whole = every, read_settings(resolved, rates, every, position, store, named=False)
    own = list(rates.figures)
    if model.sparsity is not None and mode not in ("none", "router"):
        sparsity = model.sparsity
        own.append(Figure(name="sparsity", status=sparsity.status, source=sparsity.source))
    if mode == "low-rank" and model.predictor is not None and model.predictor.active is not None:
        own.append(Figure(name="predictor.active", status="estimated", source="model document"))
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
        figures=tuple(dict.fromkeys(own)),
        assumptions=_list_assumptions(resolved, rates),
    )


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


def _list_assumptions(resolved: ResolvedPlan, rates: Rates) -> tuple[str, ...]:
    known = None if rates.dense is None else rates.dense.name
    takes = "no time, the device has no rates of it" if known is None else f"{known}'s time"
    others = [name for name in list_dense_units(resolved) if name != known]
    return (*list_assumptions(resolved, known), *(f"{name} takes {takes}" for name in others))
