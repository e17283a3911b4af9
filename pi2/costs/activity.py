"""How often a layer's neurons are used, and how many of them are missing from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log, log2
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator

from pi2.arrays import F64
from pi2.costs.constants import Constants
from pi2.costs.hotness import (
    CLASSES,
    Hotness,
    compute_hit_chances,
    find_read_chances,
    find_spread,
    halve,
    make_counted,
    measure_skew,
    read_shares,
    unite_chances,
    unite_chosen,
    unite_hotness,
    weigh_hot,
    weigh_shifts,
)
from pi2.importing.conversion_job import read_summary
from pi2.plan.documents.model import Model

PredictorMode = Literal["none", "gate", "low-rank", "router"]
LOOK_AHEAD_MODES: frozenset[PredictorMode] = frozenset(("low-rank", "router"))
"""Predictors whose reads may begin before the layer's input is known (P254)."""
Policy = Literal["lfu", "lru"]

_NORMAL = NormalDist()
_CHURN = 0.5
"""Slots lost per missing neuron, which takes one for about a token; counted with `NeuronCache`."""
_MEMORY_TOKENS = 64.0 / log(2.0)
"""Tokens that the counts of ``lfu`` remember: their half-life is `pi2.memory.policy`'s."""
ABSENT = 0.8
"""Chance that a missing neuron's neighbour is missing too; counts ask for 0.55 to 0.95."""
_CROWDED = 0.3
"""Misses of a token over the cache's neurons from which ``lru`` may be the better policy."""
_STEPS = 24


LASTING_SPREAD = 0.13
"""Popularity that experts have in all texts: a list of the hottest 6 % of them hits 10 %."""


def find_routing_law(experts: int, constants: Constants | None = None) -> tuple[float, float]:
    """Distance of the means of experts' scores, in deviations of a score; and the part of a choice
    that the previous token decides, beyond what texts repeat. Both grow up to 128 experts."""
    constants, doublings = constants or Constants(), log2(experts)
    share, repeats = min(max(doublings - 3.0, 0.0) / 4.0, 1.0), min(max(doublings - 6.0, 0.0), 1.0)
    return constants.routing_spread * share, constants.routing_repeat * repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedReads:
    """What neighbours in the store make of a missing neuron's read."""

    requests: float = 1.0
    """Requests for each missing neuron."""
    unwanted: float = 0.0
    """Neurons between them that are read and thrown away, for each missing one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivity:
    """Uses of the neurons of one layer."""

    named: Hotness
    """Hotness of the neurons that the engine computes, which the predictor names."""
    chosen: float
    """Chance of an expert to compute a token; 1 without experts."""
    neurons: int
    """Number of neurons of the layer, all experts together."""
    opened: float = 1.0
    """Share of computed neurons whose gate is open: their up row is read as well."""
    fired: float = 1.0
    """Share whose activation is not zero: their down column is read as well."""
    again: float = 0.0
    """Part of a neuron's activation that the previous token decides."""
    grain: int = 1
    """Neurons that are used together: an expert's, if a router names them."""
    always: int = 0
    """Neurons that every token computes, such as shared experts: the first that stay."""
    never: int = 0
    """Neurons that no token computes: they fill up layers that have fewer experts than others."""
    lasting: Hotness | None = None
    """Hotness over all texts, by which experts stay in memory; None for ``named``."""
    products: float | None = None
    """Mean neurons that a step of several sequences computes; None for ``used``."""

    @property
    def varied(self) -> int:
        return self.neurons - self.always - self.never

    @property
    def used(self) -> float:
        return self.always + self.named.active * self.varied * self.chosen

    def count_within(self, share: float) -> float:
        """Mean neurons that a token uses of the hottest ``share`` of the layer."""
        hot, _ = self.divide_room(share, 0.0)
        chances = average_chances(self.lasting or self.named)
        uses = float((chances * weigh_hot(hot)).sum()) * self._class_uses
        return min(share * self.neurons, self.always) + uses

    def count_united(self, tokens: int) -> float:
        """Mean neurons that any of ``tokens`` computes."""
        return (
            self.always
            + float((1.0 - (1.0 - (self._chances * self.chosen)) ** tokens).mean()) * self.varied
        )

    def divide_room(self, hot: float, cold: float) -> tuple[float, float]:
        """Shares of the varying neurons that stay and that the cache holds."""
        if self.varied == self.neurons:
            return hot, cold
        if self.varied == 0:
            return 1.0, 0.0
        rooms = [max(share * self.neurons - self.always, 0.0) for share in (hot, hot + cold)]
        kept, both = (min(room / self.varied, 1.0) for room in rooms)
        return kept, both - kept

    def count_missing(
        self, hot: float, cold: float, policy: Policy, leave_out: float = 0.0
    ) -> float:
        """Mean neurons read per token; ``hot`` and ``cold`` are shares of the layer."""
        lost = max(self.always - (hot + cold) * self.neurons, 0.0)
        hot, cold = self.divide_room(hot, cold)
        if hot + cold >= 1.0:
            return lost
        part = 1.0
        if self.lasting is not None and hot > 0.0:
            # Among the others popularity within the text begins anew.
            kept = average_chances(self.lasting)
            part = 1.0 - float((kept * weigh_hot(hot)).sum() / kept.sum())
            hot, cold = 0.0, cold / (1.0 - hot)
        hits = self.find_hits(hot, cold, policy)
        return lost + part * self._count(hot, hits, self.find_read_chances(hot, hits, leave_out))

    def find_read_chances(self, hot: float, hits: F64, leave_out: float) -> F64:
        """Chance [CLASSES] that a named, missing neuron is read, given ``leave_out``."""
        missing = (1.0 - weigh_hot(hot)) * (1.0 - hits)
        return find_read_chances(self._chances, missing, leave_out)

    @lru_cache(maxsize=4096)  # noqa: B019 - activities are values
    def find_hits(self, hot: float, cold: float, policy: Policy) -> F64:
        """Chance [CLASSES] that a used cold neuron is cached; shares are of the varying neurons.
        ``lru`` by Che's approximation; ``lfu`` keeps the highest counts and is never worse."""
        if hot + cold >= 1.0:
            return np.ones(CLASSES)
        if policy == "lru":
            return compute_hit_chances(self.named, hot, cold, self.chosen, self.again)
        stays = self._find_frequent(hot, cold)
        missing = self._count(hot, stays)
        if missing < _CROWDED * cold * self.varied:
            return stays
        recent = self.find_hits(hot, cold, "lru")
        return stays if missing <= self._count(hot, recent) else recent

    def _count(self, hot: float, hits: F64, read: F64 | float = 1.0) -> float:
        """Mean neurons that are missing, and ``read``."""
        chances = self._chances * (1.0 - weigh_hot(hot)) * (1.0 - hits) * read
        return float(chances.sum()) * self._class_uses

    def merge_reads(self, hot: float, cold: float, gap: int) -> MergedReads:
        """Reads that neighbours of an expert share where reads cross up to ``gap`` neurons."""
        weights = self._chances * (1.0 - weigh_hot(min(sum(self.divide_room(hot, cold)), 1.0)))
        if not weights.any():
            return MergedReads()
        chances = ABSENT * self._chances
        rests = 1.0 - chances
        begins = rests ** (gap + 1)
        between = sum(
            (count * chances * rests**count for count in range(1, gap + 1)), np.zeros(CLASSES)
        )
        return MergedReads(
            requests=float(np.average(begins, weights=weights)),
            unwanted=float(np.average(between, weights=weights)),
        )

    def _find_frequent(self, hot: float, cold: float) -> F64:
        """Counts over m remembered tokens have mean c m and variance c m / 2, c a chance."""
        absent = 1.0 - weigh_hot(hot)
        counts = self._chances * self.chosen * _MEMORY_TOKENS
        spread = np.sqrt(np.maximum(counts / 2.0, 1e-12))
        uses = absent * self._chances * self._class_uses
        stays, missing = absent, 0.0

        def is_full(least: float) -> bool:
            nonlocal stays, missing
            values = (counts - least) / spread
            # Of the normal distribution, nearly.
            stays = 0.5 * (1.0 + np.tanh(0.7978846 * (values + 0.044715 * values**3)))
            missing = float((uses * (1.0 - stays)).sum())
            return float((absent * stays).mean()) + _CHURN * missing / self.varied > cold

        halve(-_MEMORY_TOKENS, _MEMORY_TOKENS, is_full, _STEPS)
        # What the last token read is still there, as far as there is room for it.
        room = min(cold * self.varied / max(missing, 1e-9), 1.0)
        repeated = self.again * (1.0 - self._chances) * self.chosen * room
        return np.asarray(stays + (1.0 - stays) * repeated)

    @property
    def _chances(self) -> F64:
        return average_chances(self.named)

    @property
    def _class_uses(self) -> float:
        return self.varied * self.chosen / CLASSES


def unite_activity(activity: LayerActivity, batch: int) -> LayerActivity:
    """What ``batch`` sequences use together: a neuron is read and kept for all of them."""
    if batch == 1:
        return activity
    one, chosen = activity.named, activity.chosen
    named = unite_hotness(one, batch, chosen)
    chances = average_chances(one)
    united = unite_chances(chances, batch, chosen)
    # Of the neurons that any sequence names, those with an open gate in any.
    opened = unite_chances(chances * activity.opened, batch, chosen)
    fired = unite_chances(chances * activity.fired, batch, chosen)
    return replace(
        activity,
        named=named,
        chosen=unite_chosen(chosen, batch),
        opened=min(1.0, float(opened.sum() / united.sum())),
        fired=min(1.0, float(fired.sum() / united.sum())),
        products=activity.used * batch,
    )


@lru_cache(maxsize=512)
def average_chances(hotness: Hotness) -> F64:
    """Mean chance [CLASSES] over tokens that use different numbers of neurons."""
    if hotness.active >= 1.0:
        return np.ones(CLASSES)
    points, weights = weigh_shifts(25)
    shifts = points * Constants().token_variation
    rows = np.stack([hotness.compute_chances(float(shift)) for shift in shifts])
    chances = (rows * weights[:, None]).sum(axis=0)
    chances *= hotness.active / float(chances.mean())
    chances.flags.writeable = False
    return np.asarray(np.minimum(chances, 1.0))


Described = tuple[tuple[LayerActivity, ...], str]
"""Activity of each layer, and its source."""


def _make_layers(
    model: Model, shares: Sequence[tuple[float, float]], spread: float | None = None
) -> tuple[LayerActivity, ...]:
    if spread is None:
        _, spread = _read_model(model, "gate", Constants())
    layers = [
        LayerActivity(
            named=Hotness(active=share, spread=spread if share < 1.0 else 0.0),
            chosen=1.0,
            neurons=model.layer_neurons,
            fired=fired,
        )
        for share, fired in shares
    ]
    return _choose_experts(model, layers)


def describe_activity(
    model: Model,
    mode: PredictorMode,
    store: Path | None = None,
    constants: Constants | None = None,
    *,
    batch: int = 1,
) -> Described:
    """Activity of each layer for ``batch`` sequences, by the ``store``'s statistics, if any."""
    found, source = _describe_single(model, mode, store, constants)
    return tuple(unite_activity(item, batch) for item in found), source


def _describe_single(
    model: Model, mode: PredictorMode, store: Path | None, constants: Constants | None
) -> Described:
    constants = constants or Constants()
    if mode == "router":
        return describe_routing(model, constants)
    if mode == "gate" and model.is_smooth and model.cut_layers:
        shares = [(1.0 - block.ffn.closed, 1.0) for block in model.blocks]
        return _make_layers(model, shares), "the model's cutoffs of gates"
    layers, source = model.shape.layers, "the store's statistics"
    known = None if store is None else read_statistics(store, layers)
    if known is None:
        stated = model.sparsity.source if model.sparsity is not None else "assumed"
        source, known = f"the model's document ({stated})", _read_document(model)
    if known is None:
        active, spread = _read_model(model, mode, constants)
        return _make_layers(model, [(active, 1.0)] * layers, spread), source
    counts = None
    if store is not None and mode != "none":
        counts = read_shares(store, layers, model.layer_neurons)
    if counts is not None:
        source = "the store's counted activations"
    found = [
        LayerActivity(
            named=make_hotness(item.named(mode), item.skew, item.active)
            if counts is None
            else make_counted(counts[number], item.named(mode)),
            chosen=1.0,
            neurons=model.layer_neurons,
            opened=item.opened(mode),
            fired=item.fired(mode),
        )
        for number, item in enumerate(known)
    ]
    return _choose_experts(model, found), source


def _choose_experts(model: Model, layers: Sequence[LayerActivity]) -> tuple[LayerActivity, ...]:
    """The layers with their shares of neurons that may compute."""
    parts = [block.ffn.neurons / model.layer_neurons for block in model.blocks[: len(layers)]]
    return tuple(replace(layer, chosen=part) for layer, part in zip(layers, parts, strict=True))


def describe_routing(model: Model, constants: Constants) -> Described:
    """Popularity and repetition of experts."""
    moe = model.moe
    assert moe is not None
    spread, repeat = find_routing_law(moe.experts, constants)
    active = moe.active_experts / moe.experts
    layer = LayerActivity(
        named=Hotness(active=active, spread=spread),
        chosen=1.0,
        neurons=model.layer_neurons,
        again=repeat,
        grain=model.shape.ffn,
        lasting=Hotness(active=active, spread=min(spread, LASTING_SPREAD)),
    )

    found = []
    for ffn in (block.ffn for block in model.blocks):
        varied = moe.experts * model.shape.ffn if ffn.has_router else 0
        always = moe.count_shared(model.shape.ffn) if varied else ffn.neurons
        never = model.layer_neurons - varied - always
        found.append(replace(layer, always=always, never=never))
    return tuple(found), "published routing of experts"


def _read_document(model: Model) -> Sequence[LayerStatistics] | None:
    """Layers as the model document states them; None where it does not."""
    if model.sparsity is None or model.sparsity.gate_open is None:
        return None
    active, spread = _read_model(model, "gate", Constants())
    predicted, _ = _read_model(model, "low-rank", Constants())
    skew = measure_skew(Hotness(active=active, spread=spread))
    layer = LayerStatistics(
        active=active, gate_positive=model.sparsity.gate_open, predicted=predicted, skew=skew
    )
    return [layer] * model.shape.layers


def describe_shares(
    model: Model, shares: Sequence[tuple[float, float]], batch: int = 1
) -> tuple[LayerActivity, ...]:
    """Layers that compute a share of their neurons, and of these fire a part: (share, part)."""
    return tuple(unite_activity(item, batch) for item in _make_layers(model, shares))


@lru_cache(maxsize=512)
def make_hotness(active: float, skew: float, fires: float | None = None) -> Hotness:
    """Hotness from the mean share of uses and the share that makes 80 % of activations."""
    if active >= 1.0:
        return Hotness(active=1.0, spread=0.0)
    return Hotness(active=active, spread=find_spread(min(fires or active, active), skew))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics:
    """What a store says of a layer."""

    active: float
    gate_positive: float | None = None
    predicted: float | None = None
    skew: Annotated[float, AfterValidator(lambda skew: round(skew, 3))]
    """Rounded, so that layers that are nearly alike share their distribution."""

    def named(self, mode: PredictorMode) -> float:
        if mode not in ("gate", "low-rank"):
            return 1.0
        stated = self.gate_positive if mode == "gate" else self.predicted
        return self.active if stated is None else stated

    def opened(self, mode: PredictorMode) -> float:
        return min(1.0, self.named("gate") / max(self.named(mode), 1e-9))

    def fired(self, mode: PredictorMode) -> float:
        return min(1.0, self.active / max(self.named(mode), 1e-9))


@dataclass(frozen=True, slots=True)
class _Statistics:
    layers: tuple[LayerStatistics, ...]


def read_statistics(store: Path, layers: int) -> Sequence[LayerStatistics] | None:
    """Layers of ``statistics.json``; None where there is no such file, or not for this model."""
    found = read_summary(store, _Statistics)
    return None if found is None or len(found.layers) != layers else found.layers


def _read_model(model: Model, mode: PredictorMode, constants: Constants) -> tuple[float, float]:
    """Share of neurons computed, and the spread of their means, by kind of activation."""
    active = constants.default_active if model.sparsity is None else model.sparsity.active
    spread = constants.smooth_spread if model.is_smooth else constants.default_spread
    if model.sparsity is not None and model.sparsity.skew is not None:
        spread = find_spread(active, model.sparsity.skew)
    if mode in ("none", "router"):
        return 1.0, spread
    predictor = model.predictor
    if mode == "low-rank" and predictor is not None and predictor.active is not None:
        return predictor.active, spread
    if mode == "low-rank" and not model.is_smooth:
        return name_more(active, constants), spread
    return active, spread


def name_more(active: float, constants: Constants) -> float:
    """Share of the neurons that a predictor names of a model of which ``active`` fire."""
    if not 0.0 < active < 1.0:
        return active
    return _NORMAL.cdf(_NORMAL.inv_cdf(active) + constants.named_margin)
