"""Time of a generated token and of a prompt, as a sum of terms that can be looked at.

Every term names its source; notes/planner.md explains them. A layer of a token:

    attention  weights of the projections, and the KV cache of the context
    norm       beginning and end of the FFN, and an MoE model's router
    predict    finding the active neurons
    look up    the neuron cache: a fixed part, and one for every missing neuron
    python     the engine's work between these steps
    compute    active neurons in memory, then the read ones
    dense      neurons that an NPU or GPU computes at the same time
    read       missing neurons from flash
    wait       the part of ``read`` that no computation hides

Once a token there are the head, and the row of an embedding that is read from flash. A layer takes
attention + norm + predict + look up + python + max(compute, dense) + wait. Expected values replace
figures that vary from token to token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pi2.costs.activity import (
    Described,
    LayerActivity,
    describe_activity,
    describe_routing,
    describe_shares,
)
from pi2.costs.constants import Constants, Figure, Range
from pi2.costs.cost_layer import (
    PROMPT,
    LayerCost,
    PromptCost,
    PromptSettings,
    cost_layer,
    cost_prompt,
    read_prompt_settings,
)
from pi2.costs.kernel_times import Rates
from pi2.costs.rates import read_rates, read_whole_rates
from pi2.costs.settings import POSITION, Settings, read_settings, share_cold
from pi2.costs.terms import LayerKind, time_head, time_row
from pi2.diagnostics import UserError
from pi2.memory.arena import count_lent_bytes
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

    def find_core_share(self) -> float:
        """Part of its speed that the processor keeps: the less, the longer a token reads."""
        most = 1.0 - self.rates.core_share
        if most <= 0.0 or all(kind.hot >= 1.0 for kind in self.kinds):
            return 1.0
        costs = [(kind.count, cost_layer(kind)) for kind in self.kinds]
        read_s = sum(count * cost.read_s for count, cost in costs)
        token_s = self.head_s + sum(count * cost.total_s for count, cost in costs)
        return 1.0 - most * min(1.0, _READING_WEIGHT * read_s / (read_s + token_s))


def read_plan_rates(resolved: ResolvedPlan, constants: Constants | None = None) -> Rates:
    """Rates of the units that a plan uses; UserError P351 names missing figures."""
    for unit in resolved.source.whole_units:
        return read_whole_rates(resolved.device, unit, constants)
    # Units next to the processor: of neurons, of rows of projections, and of prompts.
    rows, prompts = resolved.divided_rows, resolved.plan.prefill.unit
    units = list_dense_units(resolved) + ([] if rows is None else [rows.unit])
    units += [] if prompts in (None, resolved.sparse_unit) else [str(prompts)]
    width = resolved.model.shape.stored_hidden
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
        cuts = resolved.thresholds.layers
        shares = [(x.computed, min(1.0, x.active / max(x.computed, 1e-9))) for x in cuts]
        activity = describe_shares(model, shares, batch), "the plan's thresholds"
    elif activity is None and mode == "gate" and plan.sparsity is not None and plan.sparsity.target:
        shares = [(1.0 - plan.sparsity.target, 1.0)] * model.shape.layers
        activity = describe_shares(model, shares, batch), "the plan's sparsity.target"
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
        routes = describe_routing(model, rates.constants)[0]
    colds = share_cold(resolved, position)
    kinds: dict[tuple[LayerActivity, LayerActivity | None, float, float, float], list[int]] = {}
    for number, layer in enumerate(resolved.layers):
        shares = (layer.hot, colds[number], layer.find_dense_share(batch))
        key = (uses[number], routes[number], *shares)
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
            activity=activity,
            hot=hot,
            cold=cold,
            dense=dense,
            layers=tuple(numbers),
            routing=routing,
        )
        for (activity, routing, hot, cold, dense), numbers in kinds.items()
    )


def count_memory(resolved: ResolvedPlan, tokens: int = POSITION) -> int:
    """Resident bytes after ``tokens`` of context: segments' needs, used KV cache, neuron cache."""
    return resolved.source.count_memory(resolved, tokens, count_lent_bytes(resolved, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted time, memory and energy of a plan."""

    inputs: Description
    layers: tuple[LayerCost, ...]
    prefill: PromptCost | None
    """None where no arithmetic rate is known."""
    prompt: int = PROMPT
    """Tokens of the prompt."""
    memory_bytes: int
    """Expected peak: everything that is resident once the caches are full."""
    ends: tuple[Cost, Cost] | None = None
    """The same with all rates low, and high, as they are on devices of the kind; None if not asked
    for."""

    @property
    def settings(self) -> Settings:
        return self.inputs.settings

    @property
    def embedding_s(self) -> float:
        """Seconds to read the rows of the tokens' embeddings, if they do not stay in memory."""
        return self.settings.batch * self.inputs.embedding_s

    @property
    def grain(self) -> int:
        """Neurons that are read together, such as an expert's."""
        return max(kind.activity.grain for kind in self.inputs.kinds)

    @property
    def range_tokens_s(self) -> Range:
        """Tokens per second that a plan promises, that are expected, and at most."""
        return self._find_range(self.tokens_s, *(x.tokens_s for x in self.ends or ()))

    @property
    def prefill_tokens_s(self) -> float | None:
        return None if self.prefill is None else self.prefill.tokens_s

    @property
    def range_prefill_tokens_s(self) -> Range | None:
        own = self.prefill_tokens_s
        if own is None:
            return None
        return self._find_range(own, *(x.prefill_tokens_s or own for x in self.ends or ()))

    @staticmethod
    def _find_range(expected: float, *ends: float) -> Range:
        every = (expected, *ends)
        return Range(low=min(every), expected=expected, high=max(every))

    @property
    def token_s(self) -> float:
        once_s = self.inputs.head_s + self.embedding_s
        return sum(layer.total_s for layer in self.layers) + once_s

    @property
    def tokens_s(self) -> float:
        return self.settings.batch / self.token_s

    @property
    def token_j(self) -> float | None:
        """Joules per token; the processor always draws power, the other unit while it computes."""
        rates, power_w = self.inputs.rates, self.inputs.rates.power_w
        if power_w is None:
            return None
        both_w = rates.both_w if self.inputs.uses_dense else None
        dense_s = sum(layer.dense_s for layer in self.layers)
        added = ((both_w or power_w) - power_w) * min(dense_s, self.token_s)
        return (power_w * self.token_s + added) / self.settings.batch

    @property
    def hit_rate(self) -> float:
        used = sum(layer.used for layer in self.layers)
        return 1.0 - sum(layer.missing for layer in self.layers) / used if used else 1.0


def cost_plan(
    resolved: ResolvedPlan, rates: Rates | None = None, *, prompt: int = PROMPT, **known: Any
) -> Cost:
    """Cost of a token and of a prompt, with ranges; ``known`` as for `describe_plan`. UserError
    P351."""
    described = describe_range(resolved, rates, **{"store": resolved.store_path, **known})
    return cost_description(described, prompt, memory_bytes=count_memory(resolved))


def describe_speed(resolved: ResolvedPlan) -> str | None:
    """The predicted speed with its range; None if the device lacks a figure."""
    try:
        return f"{cost_plan(resolved).range_tokens_s.write()} tokens/s, predicted"
    except UserError:
        return None


def cost_resolved(
    resolved: ResolvedPlan, rates: Rates | None = None, *, prompt: int = PROMPT, **known: Any
) -> Cost:
    """Cost of a plan without a file, and without ranges."""
    described = describe_plan(resolved, rates, **known)
    return cost_description(described, prompt, memory_bytes=count_memory(resolved))


def cost_description(
    description: Description, prompt: int = PROMPT, *, memory_bytes: int = 0
) -> Cost:
    costs: dict[int, LayerCost] = {}
    for kind in description.kinds:
        costs |= dict.fromkeys(kind.layers, cost_layer(kind))
    ends = description.ends
    return Cost(
        inputs=description,
        layers=tuple(costs[number] for number in range(description.layers)),
        prefill=cost_prompt(description, prompt),
        prompt=prompt,
        memory_bytes=memory_bytes,
        ends=ends and (cost_description(ends[0], prompt), cost_description(ends[1], prompt)),
    )


LEAST_TOKENS = 16
"""Fewer tokens say little about a speed."""


def find_promise(resolved: ResolvedPlan, position: int) -> Cost | None:
    """What the plan is predicted to do where its device was probed; None elsewhere."""
    if not any(unit.kernels for unit in resolved.device.units.values() if unit.kind == "cpu"):
        return None
    try:
        return cost_plan(resolved, position=max(position, 1))
    except UserError:
        return None


def describe_promise(cost: Cost, tokens_s: float) -> str:
    """One line: the prediction, how the run compares, and what to do where it is far off."""
    found = cost.range_tokens_s
    told = f"promise: predicted {found.write()} tokens/s"
    away = tokens_s / cost.tokens_s - 1.0
    if found.low <= tokens_s <= found.high:
        return f"{told}: the run is as fast as that"
    word = "slower" if away < 0 else "faster"
    return (
        f"{told}: the run is {abs(away):.0%} {word}; if no other work explains it, the device "
        "file is out of date: measure again with `pi2 probe`, and plan again"
    )
