"""The best plan within a memory: choices are improved one after the other, by the cost model.

Shares of memory are tried in plain numbers. Plans with sizes are made of the best choices only
(`pi2.planning.refinement`), and tried with all else that the search leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from statistics import mean
from typing import Any, Literal

import numpy as np

from pi2.costs.activity import (
    LOOK_AHEAD_MODES,
    Described,
    PredictorMode,
    average_chances,
    describe_activity,
)
from pi2.costs.cost import Cost, Description, cost_description, cost_resolved, describe_plan
from pi2.costs.cost_layer import cost_layer
from pi2.costs.hotness import halve
from pi2.costs.kernel_times import Rates
from pi2.costs.reads import IoChoice, list_io_choices
from pi2.costs.settings import LookAhead, find_range_bytes, read_stored
from pi2.costs.terms import LayerKind
from pi2.fitting.budget import (
    MIB,
    SHARE_STEPS,
    Shortage,
    count_runtime,
    find_room,
    fit_plan,
    round_share,
)
from pi2.fitting.completion import resolve_values
from pi2.memory.arena import count_lent_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import find_block_bytes, list_chunks
from pi2.plan.documents.plan import KvType
from pi2.plan.documents.quantities import round_size
from pi2.plan.weights.layout import BundleLayout, round_up
from pi2.planning.wish import LEAST_DENSE, Wish, write_values

Place = Literal["resident", "flash"]
_CACHE_SHARES = (0.1, 0.2, 0.3, 0.45, 0.65, 0.9)
"""Parts of the neurons in memory that may be a cache."""
_RESPECTS = ("cached", "embedding", "kv", "lends", "chunk", "by_activity")
_ROUNDS = 3
_HALVINGS = 7
_CLUSTER = 16
"""Neurons that are read and computed together before others are tried."""
_PROMPT_PART = 0.03
"""What a prompt's token counts for against a generated one."""
_READ_PART = 0.01
"""What hidden reads count for: of plans that are as fast, the one that reads less is better."""
_SPARE_BYTES = 2 * MIB
"""Sizes are written in whole MiB, rounded up: hot neurons, and the cache."""
_STREAMS = IoChoice(engine="io_uring", threads=1, depth=128, neuron_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What decides where memory goes."""

    predictor: PredictorMode
    kv: KvType
    embedding: Place
    chunk: int
    cached: float
    """Part of the neurons in main memory that is a cache, unless all are there."""
    dense: float = 0.0
    """Share of each layer that the dense unit computes."""
    lends: bool = False
    """Whether the cache has the context's memory until it is used."""
    by_activity: bool = False
    """Whether layers keep neurons by how often they are used, else the same share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All of a plan but the places of its neurons."""

    resolved: ResolvedPlan
    description: Description
    lent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A wish, what its device does, and what the model and device leave open."""

    wish: Wish
    rates: Rates
    bundle: BundleLayout
    predictors: tuple[PredictorMode, ...]
    ios: tuple[IoChoice, ...]
    look_aheads: tuple[LookAhead, ...]
    activities: Mapping[PredictorMode, Described]
    by_expert: bool = False
    """Whether the store's order puts an expert's neurons together."""
    frames: dict[tuple[Choices, bool], Frame] = field(default_factory=dict)
    """Known ones; the same for all memories."""

    @property
    def layer_bytes(self) -> int:
        return self.wish.model.layer_neurons * self.bundle.stride

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """fp16, and int8 unless the result may not change."""
        return ("fp16",) if self.wish.exact else ("fp16", "int8")

    @property
    def embeddings(self) -> tuple[Place, ...]:
        """In memory, or on flash unless it is also the head or reads are unmeasured."""
        if self.wish.model.tied_head or self.rates.flash is None:
            return ("resident",)
        return ("resident", "flash")

    @property
    def chunks(self) -> tuple[int, ...]:
        return list_chunks(self.wish.model, self.wish.context)

    def resolve(
        self, choices: Choices, hots: Sequence[float], denses: Sequence[float], **tables: Any
    ) -> ResolvedPlan:
        """A plan of choices, and of each layer's hot and dense shares, without sizes."""
        values = write_values(self, choices, hots, denses) | tables
        return resolve_values(values, self.wish.device, self.wish.model)

    def resolve_even(
        self, choices: Choices, hot: float, dense: float = 0.0, **tables: Any
    ) -> ResolvedPlan:
        """The same of layers that are alike."""
        layers = self.wish.model.shape.layers
        return self.resolve(choices, [hot] * layers, [dense] * layers, **tables)

    def find_cost(self, resolved: ResolvedPlan) -> Cost:
        """The cost of a plan with all sizes."""
        activity = self.activities[resolved.plan.decode.predictor]
        return cost_resolved(resolved, self.rates, store=self.wish.store, activity=activity)

    def find_frame(self, choices: Choices, *, whole: bool) -> Frame:
        """The plan around its neurons, all of which are in memory if it is ``whole``."""
        bare = replace(choices, cached=0.0, dense=float(choices.dense > 0.0), by_activity=False)
        bare = replace(bare, lends=bare.lends and not whole)
        if (bare, whole) not in self.frames:
            uses_dense = self.rates.dense is not None and bare.dense > 0.0
            least = 1.0 / SHARE_STEPS if uses_dense else 0.0
            pipeline = {"cluster": _CLUSTER, "phases": 1}
            resolved = self.resolve_even(bare, 1.0 if whole else least, least, pipeline=pipeline)
            known: dict[str, Any] = {"activity": self.activities[bare.predictor]}
            self.frames[bare, whole] = Frame(
                resolved=resolved,
                description=describe_plan(resolved, self.rates, store=self.wish.store, **known),
                lent_bytes=count_lent_bytes(resolved),
            )
        return self.frames[bare, whole]


def pose_problem(wish: Wish, rates: Rates, bundle: BundleLayout | None = None) -> Problem:
    """Choices that device and model leave; by default the closest ``bundle``."""
    model = wish.model
    if bundle is None:
        least = round_up(model.lay_out_bundle().used_bytes, find_block_bytes(wish.device))
        bundle = model.lay_out_bundle(least)
    modes, ahead = list_predictors(wish)
    activities = {
        mode: describe_activity(model, mode, wish.store, batch=wish.batch) for mode in modes
    }
    ios: tuple[IoChoice, ...] = (_STREAMS,)
    if rates.flash is not None:
        range_bytes = find_range_bytes(model, bundle.stride, wish.store)
        listed = list_io_choices(rates.flash, bundle.stride, range_bytes, rates.room_s)
        # UFS is the storage of phones, whose system forbids programs to use io_uring.
        ios = tuple(x for x in listed if x.engine == "pread" or rates.flash.has_io_uring)
    stored = read_stored(wish.store)
    return Problem(
        wish=wish,
        rates=rates,
        bundle=bundle,
        predictors=tuple(modes),
        ios=ios,
        look_aheads=ahead,
        activities=activities,
        by_expert=stored is not None and stored.order == "expert",
    )


def list_predictors(wish: Wish) -> tuple[list[PredictorMode], tuple[LookAhead, ...]]:
    """Ways to find neurons, and when reads may begin."""
    model = wish.model
    exact: PredictorMode = "none" if model.moe is None else "router"
    modes: list[PredictorMode] = []
    if model.predictor is not None and not wish.exact:
        modes.append("low-rank")
    if not model.is_smooth or model.cut_layers:
        modes.append("gate")
    if exact == "router" and "low-rank" not in modes:
        modes.append(exact)
    if not modes or model.cut_layers:
        # With everything in memory, gates may take more of it than they save time.
        modes.append(exact)
    return modes, ("none", "layer") if LOOK_AHEAD_MODES.intersection(modes) else ("none",)


def list_least(problem: Problem) -> list[Choices]:
    """The choices of each predictor that take the least memory, before shares are chosen."""
    return [
        Choices(
            predictor=predictor,
            kv=problem.kv_types[-1],
            embedding=problem.embeddings[-1],
            chunk=problem.chunks[0],
            cached=_list_cached(predictor)[-1],
        )
        for predictor in problem.predictors
    ]


def find_least(problem: Problem) -> tuple[int, Choices]:
    """The smallest budget of any plan, and its choices."""
    found, whole = [], problem.rates.flash is None
    for choices in list_least(problem):
        resolved = problem.resolve_even(choices, float(whole))
        if whole:
            found.append((fit_plan(resolved, None).plan.memory.budget, choices))
            continue
        try:
            fit_plan(resolved, MIB)
        except Shortage as shortage:
            found.append((shortage.needed_bytes, choices))
    return min(found, key=lambda item: item[0])


def find_best(problem: Problem, memory_bytes: int) -> Iterator[ResolvedPlan]:
    """Plans of the best choices of each predictor within a memory."""
    for start in list_least(problem):
        if problem.rates.dense is not None:
            start = replace(start, cached=_list_cached(start.predictor)[0], dense=LEAST_DENSE)
        score = partial(_score, problem, memory_bytes)
        best, least = start, score(start)
        for _ in range(_ROUNDS):
            before = best
            for respect in _RESPECTS:
                for option in _vary(problem, best, respect, memory_bytes):
                    if option != best and (found := score(option)) < least:
                        best, least = option, found
            if best == before:
                break
        described = lay_out(problem, best, memory_bytes)
        if described is not None:
            layers = {number: kind for kind in described.kinds for number in kind.layers}
            kinds = [layers[number] for number in sorted(layers)]
            hots = [1.0 if kind.hot >= 1.0 - 1e-6 else round_share(kind.hot) for kind in kinds]
            denses = [round_share(min(x.dense, hot)) for x, hot in zip(kinds, hots, strict=True)]
            # The search rounds otherwise: in a hair's breadth there may be no plan.
            with suppress(Shortage):
                yield fit_plan(problem.resolve(best, hots, denses), round_size(memory_bytes))


def _list_cached(predictor: PredictorMode) -> tuple[float, ...]:
    if predictor == "none":
        return (0.0,)
    # Which experts will be used, the cache finds out better than anybody knows before.
    return (1.0,) if predictor == "router" else _CACHE_SHARES


def _vary(problem: Problem, best: Choices, respect: str, memory_bytes: int) -> Sequence[Choices]:
    """Choices that differ from ``best`` in one of `_RESPECTS`."""
    predictor = best.predictor
    options: dict[str, Sequence[Any]] = {
        "cached": _list_cached(predictor),
        "embedding": problem.embeddings,
        "kv": problem.kv_types,
        "lends": (False, predictor != "none"),
        "chunk": problem.chunks,
        "by_activity": (False, len(set(problem.activities[predictor][0])) > 1),
    }
    found = [replace(best, **{respect: value}) for value in options[respect]]
    if respect != "cached" or problem.rates.dense is None:
        return found
    # Only hot neurons can be a unit's: both shares are chosen together.
    return [
        replace(item, dense=share)
        for item in found
        for share in _list_dense(problem, item, memory_bytes)
    ]


def _list_dense(problem: Problem, choices: Choices, memory_bytes: int) -> list[float]:
    """Shares of a dense unit: the least, half of the one with which both units are ready together,
    that one, and all that it may have."""
    unit = problem.rates.dense
    assert unit is not None
    model, least, most = problem.wish.model, LEAST_DENSE, 1.0
    if (memory := problem.wish.find_unit_memory(unit.name)) is not None:
        most = min(memory / (model.shape.layers * problem.layer_bytes), 1.0)

    def is_ready_first(share: float) -> bool:
        described = lay_out(problem, replace(choices, dense=share), memory_bytes)
        if described is None:
            return False
        cost = cost_layer(max(described.kinds, key=lambda item: item.count))
        return cost.dense_s < cost.predict_s + cost.look_up_s + cost.compute_s

    low, high = halve(least, max(most, least), is_ready_first, _HALVINGS)
    return [least, max(low / 2, least), low, high, max(most, least)]


def lay_out(problem: Problem, choices: Choices, memory_bytes: int) -> Description | None:
    """The plan with its neurons placed within a memory; None if it is too small."""
    wish, unit = problem.wish, problem.rates.dense
    streams = problem.rates.flash is None
    frame = problem.find_frame(choices, whole=streams)
    dense = choices.dense if unit is not None else 0.0
    own = unit is not None and wish.find_unit_memory(unit.name) is not None
    model = wish.model
    units = [wish.device.units[unit.name].kind] if unit is not None and dense > 0.0 else []
    room = find_room(frame.resolved, memory_bytes, count_runtime(model, memory_bytes, units=units))
    whole = model.shape.layers * problem.layer_bytes
    if dense > 0.0 and unit is not None:
        # The rows of projections that the unit has, and its share, which is rounded down.
        rows = 0 if streams else frame.resolved.needs.hot.bytes
        room -= whole // SHARE_STEPS if own else rows - whole // SHARE_STEPS
    room -= _SPARE_BYTES
    resident = (room + own * dense * whole) / whole
    if resident >= 1.0 - 1e-6:
        return _place(problem.find_frame(choices, whole=True), choices, 1.0, 0, dense)
    if streams:
        return None
    # Once the context is full, the cache has to work with what is its own.
    cached = (
        0.0
        if choices.predictor == "none"
        else max(choices.cached * room, frame.resolved.needs.cold.bytes)
    )
    hot = resident - cached / whole
    cached += choices.lends * frame.lent_bytes
    # Plans with sizes round otherwise: at the least memory they decide.
    if hot * whole < -_SPARE_BYTES or dense > max(hot, 0.0) + 1e-9:
        return None
    return _place(frame, choices, max(hot, 0.0), cached / problem.bundle.stride, dense)


def _place(frame: Frame, choices: Choices, hot: float, slots: float, dense: float) -> Description:
    """Divide hot neurons and the cache's ``slots`` among the layers."""
    kinds = frame.description.kinds
    hots = _find_hot_shares(kinds, hot) if choices.by_activity else [hot] * len(kinds)
    absent = [
        (1.0 - share) * kind.activity.neurons * (not kind.is_whole)
        for kind, share in zip(kinds, hots, strict=True)
    ]
    total = sum(item * kind.count for item, kind in zip(absent, kinds, strict=True))
    part = min(slots / total, 1.0) if total > 0.0 else 0.0
    placed = tuple(
        replace(kind, hot=share, cold=part * item / kind.activity.neurons, dense=min(dense, share))
        for kind, share, item in zip(kinds, hots, absent, strict=True)
    )
    return replace(frame.description, kinds=placed)


def _find_hot_shares(kinds: Sequence[LayerKind], hot: float) -> list[float]:
    """Shares by kind that keep the neurons which are used most, as many as ``hot`` of all."""
    chances = [
        np.ones(1) if kind.is_whole else average_chances(kind.activity.named) for kind in kinds
    ]
    owners = np.repeat(np.arange(len(kinds)), [len(item) for item in chances])
    parts = [kind.count / len(item) for item, kind in zip(chances, kinds, strict=True)]
    weights = np.array(parts)[owners]
    order = np.argsort(-np.concatenate(chances), kind="stable")
    left = hot * sum(kind.count for kind in kinds)
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.clip(left - before, 0.0, weights[order])
    sums = np.bincount(owners[order], kept, len(kinds))
    return [float(found / kind.count) for found, kind in zip(sums, kinds, strict=True)]


def _score(problem: Problem, memory_bytes: int, choices: Choices) -> float:
    """Seconds or joules of a token and a part of a prompt's; infinite if it is too large."""
    described = lay_out(problem, choices, memory_bytes)
    if described is None:
        return inf
    cost = cost_description(described)
    beside_s = _READ_PART * sum(layer.read_s for layer in cost.layers)
    beside_s += _PROMPT_PART * _time_prompt_token(problem, choices)
    return problem.wish.weigh(cost) * (1.0 + beside_s / cost.token_s)


def _time_prompt_token(problem: Problem, choices: Choices) -> float:
    """Seconds per prompt token that depend on the chunk: all neurons stream or unpack."""
    wish, rates = problem.wish, problem.rates
    layers = wish.model.shape.layers
    rate = rates.steps["gather"].bytes_s if rates.flash is None else rates.flash.find_stream_rate()
    weights = len(problem.bundle.parts) * wish.model.stored_neuron_width
    once_s = 0.0 if rates.dense_many is None else rates.dense_many[0]
    touched = 1.0
    if wish.model.moe is not None:
        routes = describe_activity(wish.model, "router", wish.store)[0]
        touched = mean(item.count_united(choices.chunk) / item.neurons for item in routes)
    pass_s = layers * wish.model.layer_neurons * weights * once_s * touched
    return (layers * problem.layer_bytes / rate + pass_s) / choices.chunk
