"""Choices that a device and a model leave, and their costs: a curve for each group of layers, of a
token's time over the neurons in memory; the rest is discrete."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Literal

import numpy as np

from pi2.costs.activity import LOOK_AHEAD_MODES, LayerActivity, PredictorMode, describe_activity
from pi2.costs.cost_layer import LayerCost, cost_layer
from pi2.costs.description import Activity, Description, describe_plan
from pi2.costs.kernel_times import Rates
from pi2.costs.reads import IoChoice, list_io_choices
from pi2.costs.settings import (
    POSITION,
    LookAhead,
    count_run,
    find_range_bytes,
    measure_sizes,
    read_stored,
)
from pi2.costs.terms import time_head, time_row
from pi2.fitting.budget import MIB, count_runtime
from pi2.fitting.completion import choose_backends, resolve_values
from pi2.fitting.sizes import find_needs
from pi2.memory.arena import describe_context
from pi2.plan.arithmetic.costs import SHORT_CHUNK, list_chunks
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.documents.device import UnitKind
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import BundleLayout, round_up
from pi2.planning.wish import LEAST_DENSE, Wish, divide_rest, make_plan_values

GROUPS = 8
"""Layers whose activity is alike share their settings, in so many groups at most."""
CACHE_SHARES = (0.1, 0.25, 0.5, 0.9)
"""Parts of the resident neurons that may be a cache."""
STREAM_SHARE = 1e-9
"""Cache share where every neuron is computed and absent ones stream by: no cache."""
_HALVINGS = 7
_CLUSTER = 16
"""Neurons that are read and computed together before others are tried."""
AHEAD: tuple[LookAhead, ...] = ("none", "layer")
"""When reads may begin."""
_GRID = np.linspace(0.0, 1.0, 17).tolist()
_STREAMS = IoChoice(engine="io_uring", threads=1, depth=128, neuron_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers with the same settings."""

    layers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layer with some of its neurons in memory."""

    resident: float
    """Share in memory."""
    dense: float
    """Share that a dense unit computes."""
    bytes: float
    """Main memory for neurons."""
    seconds: float
    """All of the layer."""
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to find the active neurons, with an amount of cache: curves per group of layers."""

    predictor: PredictorMode
    cache_share: float
    """Part of the resident neurons; 0 means that every neuron stays."""
    predictor_bytes: int
    least_cold_bytes: int
    curves: tuple[tuple[Point, ...], ...]
    """Per group."""
    cache_shares: tuple[float, ...]
    """Per group: part of its resident neurons that is a cache; none of layers that stream by."""

    @property
    def lends(self) -> bool:
        return self.cache_share > 0.0 and self.predictor != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChoice:
    """A type of KV cache."""

    type: KvType
    bytes: int
    token_s: float
    """Its extra time per token, over the cheapest."""
    lent_bytes: int = 0
    """Part of ``bytes`` that a mean token has not used yet, which the cache may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingChoice:
    """Source of the embedding's rows, and all dense weights that then stay resident."""

    place: Literal["resident", "flash"]
    bytes: int
    token_s: float
    """What reading a row adds to a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChoice:
    """A chunk of the prefill and the workspace that it needs."""

    tokens: int
    workspace_bytes: int
    pass_s: float
    """Seconds of a prompt's token for passes over all neurons, such as unpacking their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """All choices of a search, with their costs."""

    wish: Wish
    rates: Rates
    bundle: BundleLayout
    neurons: int
    groups: tuple[LayerGroup, ...]
    modes: tuple[Mode, ...]
    kvs: tuple[KvChoice, ...]
    chunks: tuple[ChunkChoice, ...]
    ios: tuple[IoChoice, ...]
    look_aheads: tuple[LookAhead, ...]
    embeddings: tuple[EmbeddingChoice, ...]
    head_s: float
    activities: Mapping[PredictorMode, Activity]
    unit_rows_bytes: int = 0
    """Main memory for a unit's rows of projections and head."""
    by_expert: bool = False
    """Whether the store's order puts an expert's neurons together."""

    @property
    def stride(self) -> int:
        return self.bundle.stride

    @property
    def unit_bytes(self) -> int | None:
        """Bytes of the dense unit's own memory; None where it uses main memory."""
        dense = self.rates.dense
        return None if dense is None else self.wish.find_unit_memory(dense.name)

    @property
    def unit_kinds(self) -> list[UnitKind]:
        dense = self.rates.dense
        return [] if dense is None else [self.wish.device.units[dense.name].kind]

    @property
    def runtime_bytes(self) -> int:
        """The segment ``runtime`` of the budget that is asked for, if any."""
        return count_runtime(self.wish.model, self.wish.memory_bytes or 0, units=self.unit_kinds)


def pose_problem(wish: Wish, rates: Rates, bundle: BundleLayout | None = None) -> Problem:
    """Choices that device and model leave, with costs; by default the closest ``bundle``."""
    model = wish.model
    if bundle is None:
        least = round_up(model.lay_out_bundle().used_bytes, find_block_bytes(wish.device))
        bundle = model.lay_out_bundle(least)
    modes, ahead = list_predictors(wish)
    activities = {
        mode: describe_activity(model, mode, wish.store, batch=wish.batch) for mode in modes
    }
    groups = _group_layers(activities[modes[0]][0])
    ios: tuple[IoChoice, ...] = (_STREAMS,)
    if rates.flash is not None:
        range_bytes = find_range_bytes(model, bundle.stride, wish.store)
        run = 1
        if "router" in modes:
            run = count_run(_resolve(wish, "router", "fp16", SHORT_CHUNK, bundle), wish.store)
        listed_ios = list_io_choices(rates.flash, bundle.stride, range_bytes, rates.room_s, run=run)
        # UFS is the storage of phones, whose system forbids programs to use io_uring.
        usable = [x for x in listed_ios if x.engine == "pread" or rates.flash.has_io_uring]
        ios = tuple(usable)
    kvs = _list_kvs(wish, rates, bundle)
    cheapest = min(kvs, key=lambda item: item.token_s).type
    listed = []
    for mode in modes:
        shares = [0.0] if rates.flash is None else [0.0, *CACHE_SHARES]
        if mode == "none" and rates.flash is not None:
            shares = [0.0, STREAM_SHARE]
        if mode == "router" and rates.flash is not None:
            # Which experts will be used, the cache finds out better than anybody knows before.
            shares = [0.0, 1.0]
        for share in shares:
            values = make_plan_values(
                wish, predictor=mode, kv=cheapest, chunk=SHORT_CHUNK, bundle=bundle
            )
            values["io"] = ios[0].write()
            values["pipeline"] = {"cluster": _CLUSTER, "phases": 1}
            values["decode"]["look_ahead"] = ahead[-1] if mode in LOOK_AHEAD_MODES else "none"
            if mode == "low-rank" and wish.leave_out > 0.0:
                values["decode"]["leave_out"] = wish.leave_out
            listed.append(_pose_mode(wish, rates, values, share, activities[mode], groups))
    stored = read_stored(wish.store)
    return Problem(
        wish=wish,
        rates=rates,
        bundle=bundle,
        neurons=model.layer_neurons,
        groups=groups,
        modes=tuple(listed),
        kvs=kvs,
        chunks=tuple(_list_chunks(wish, rates, modes[0], kvs[0].type, bundle)),
        ios=ios,
        look_aheads=ahead,
        embeddings=_list_embeddings(wish, rates, modes[0], bundle),
        head_s=_time_head(wish, rates, modes[0], bundle),
        activities=activities,
        unit_rows_bytes=_count_unit_rows(wish, rates, modes[0], bundle),
        by_expert=stored is not None and stored.order == "expert",
    )


def _list_chunks(
    wish: Wish, rates: Rates, mode: PredictorMode, kv: KvType, bundle: BundleLayout
) -> Iterator[ChunkChoice]:
    model = wish.model
    sizes = measure_sizes(model, mode, kv, bundle)
    weights = model.shape.layers * model.layer_neurons * sizes.neuron_weights
    routes = () if model.moe is None else describe_activity(model, "router", wish.store)[0]
    once_s = 0.0 if rates.dense_many is None else rates.dense_many[0]
    for tokens in list_chunks(model, wish.context):
        needs = find_needs(_resolve(wish, mode, kv, tokens, bundle))
        touched = [layer.count_united(tokens) / layer.neurons for layer in routes]
        yield ChunkChoice(
            tokens=tokens,
            workspace_bytes=round_up(needs.workspace.bytes, MIB),
            pass_s=weights * once_s * (mean(touched) if touched else 1.0) / tokens,
        )


def list_predictors(wish: Wish) -> tuple[list[PredictorMode], tuple[LookAhead, ...]]:
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
    return modes, AHEAD if LOOK_AHEAD_MODES.intersection(modes) else ("none",)


def _count_unit_rows(wish: Wish, rates: Rates, mode: PredictorMode, bundle: BundleLayout) -> int:
    """Hot bytes of a plan whose dense unit has its rows, and next to no neurons."""
    unit = rates.dense
    if unit is None:
        return 0
    values = make_plan_values(wish, predictor=mode, kv="fp16", chunk=SHORT_CHUNK, bundle=bundle)
    (cpu,) = values["layers"]["split"]
    values["layers"] = {"split": {unit.name: 0.001, cpu: 0.999}, "hot": 0.001}
    values["backends"] = choose_backends(
        {wish.device.units[name].kind for name in (cpu, unit.name)}
    )
    divide_rest(wish, rates, values)
    return find_needs(resolve_values(values, wish.device, wish.model)).hot.bytes


def _time_head(wish: Wish, rates: Rates, mode: PredictorMode, bundle: BundleLayout) -> float:
    values = make_plan_values(wish, predictor=mode, kv="fp16", chunk=SHORT_CHUNK, bundle=bundle)
    values["layers"]["hot"] = 1.0
    described = describe_plan(resolve_values(values, wish.device, wish.model), rates)
    settings = replace(described.settings, head_share=rates.fair_share)
    return time_head(rates, described.sizes, settings)


def _list_kvs(wish: Wish, rates: Rates, bundle: BundleLayout) -> tuple[KvChoice, ...]:
    """fp16, and int8 unless the result may not change."""
    types: tuple[KvType, ...] = ("fp16",) if wish.exact else ("fp16", "int8")
    model = wish.model
    mode: PredictorMode = "none"
    found = []
    for kind in types:
        resolved = _resolve(wish, mode, kind, SHORT_CHUNK, bundle)
        tokens = wish.batch * min(POSITION, wish.context)
        unused = describe_context(resolved).count_unused(tokens)
        size = measure_sizes(model, mode, kind, bundle).kv_token
        own = rates.choose(kind)
        layer_s = own.project.call_s + tokens * size / own.attend.bytes_s
        seconds = model.shape.layers * layer_s
        found.append(
            KvChoice(
                type=kind,
                bytes=round_up(find_needs(resolved).kv.bytes, MIB),
                token_s=seconds,
                lent_bytes=unused,
            )
        )
    cheapest = min(item.token_s for item in found)
    return tuple(replace(item, token_s=item.token_s - cheapest) for item in found)


def _list_embeddings(
    wish: Wish, rates: Rates, mode: PredictorMode, bundle: BundleLayout
) -> tuple[EmbeddingChoice, ...]:
    """Embedding in memory, or on flash unless it is also the head or reads are unmeasured."""
    model = wish.model
    places: tuple[Literal["resident", "flash"], ...] = ("resident", "flash")
    if model.tied_head or rates.flash is None:
        places = ("resident",)
    found = []
    for place in places:
        # A chunk's rows have to fit.
        longest = list_chunks(model, wish.context)[-1]
        values = make_plan_values(wish, predictor=mode, kv="fp16", chunk=longest, bundle=bundle)
        values["memory"]["embedding"] = place
        resolved = resolve_values(values, wish.device, model)
        found.append(
            EmbeddingChoice(
                place=place,
                bytes=round_up(find_needs(resolved).attention.bytes, MIB),
                token_s=wish.batch * time_row(rates, model) if place == "flash" else 0.0,
            )
        )
    return tuple(found)


def _resolve(
    wish: Wish, mode: PredictorMode, kv: KvType, chunk: int, bundle: BundleLayout
) -> ResolvedPlan:
    values = make_plan_values(wish, predictor=mode, kv=kv, chunk=chunk, bundle=bundle)
    return resolve_values(values, wish.device, wish.model)


def _pose_mode(
    wish: Wish,
    rates: Rates,
    values: dict[str, Any],
    cache_share: float,
    activity: Activity,
    groups: Sequence[LayerGroup],
) -> Mode:
    values["layers"]["hot"] = float(cache_share == 0.0)
    resolved = resolve_values(values, wish.device, wish.model)
    described = describe_plan(resolved, rates, store=wish.store, activity=activity)
    curves, shares = [], []
    for group in groups:
        middle = group.layers[len(group.layers) // 2]
        streams = cache_share > 0.0 and middle not in resolved.named_layers
        shares.append(STREAM_SHARE if streams else cache_share)
        # A unit that helps with projections has neurons of the most layers at least.
        helped = rates.fair_share > 0.0 and group.count == max(item.count for item in groups)
        uses = activity[0][middle]
        curves.append(
            _draw_curve(wish, described, uses, shares[-1], streams=streams, helped=helped)
        )
    needs = find_needs(resolved)
    return Mode(
        predictor=resolved.plan.decode.predictor,
        cache_share=cache_share,
        predictor_bytes=round_up(needs.predictor.bytes, MIB),
        least_cold_bytes=0 if cache_share == 0.0 else needs.cold.bytes,
        curves=tuple(curves),
        cache_shares=tuple(shares),
    )


def _draw_curve(
    wish: Wish,
    described: Description,
    activity: LayerActivity,
    cached: float,
    *,
    streams: bool,
    helped: bool,
) -> tuple[Point, ...]:
    """Times of a layer over the share in memory, of which ``cached`` is a cache. ``helped``: a
    dense unit has some of its neurons."""
    rates, model = described.rates, wish.model
    sizes, settings = described.sizes, described.settings
    if streams and described.whole is not None:
        # Layers whose neurons nobody names stream by.
        sizes, settings = described.whole
    unit = rates.dense
    if unit is not None and model.moe is None:
        # Attention is divided between both, whatever the share of neurons.
        settings = replace(settings, attention_share=rates.fair_share)
    size = activity.neurons * sizes.stride
    most, own = 1.0, False
    if unit is not None and (memory := wish.find_unit_memory(unit.name)) is not None:
        most, own = min(memory / (model.shape.layers * size), 1.0), True
    points = []
    for resident in [1.0] if cached == 0.0 else _GRID:
        part = 0.0 if streams else cached
        hot, cold = resident * (1.0 - part), resident * part

        def cost(dense: float, hot: float = hot, cold: float = cold) -> LayerCost:
            return cost_layer(rates, sizes, settings, activity, hot=hot, cold=cold, dense=dense)

        least = min(LEAST_DENSE if helped else 0.0, hot)
        denses = [0.0] if unit is None else _list_shares(cost, least, min(hot, most))
        for dense in denses:
            found = cost(dense)
            points.append(
                Point(
                    resident=resident,
                    dense=dense,
                    bytes=(resident - dense * own) * size,
                    seconds=found.total_s,
                    dense_s=found.dense_s,
                )
            )
    return tuple(points)


def _list_shares(cost: Callable[[float], LayerCost], least: float, most: float) -> list[float]:
    """Shares of a dense unit: the least, half of the one with which both units are ready together,
    that one, and all that it may have."""
    low, high = least, max(most, least)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = cost(middle)
        busy_s = found.predict_s + found.look_up_s + found.compute_s
        low, high = (middle, high) if found.dense_s < busy_s else (low, middle)
    return sorted({least, max(low / 2, least), low, high, max(most, least)})


def _group_layers(activities: Sequence[LayerActivity]) -> tuple[LayerGroup, ...]:
    keys = [round(item.used - item.count_within(0.5), 6) for item in activities]
    kinds = sorted(set(keys))
    if len(kinds) <= GROUPS:
        parts = [[n for n, key in enumerate(keys) if key == kind] for kind in kinds]
    else:
        order = sorted(range(len(keys)), key=lambda number: (keys[number], number))
        parts = [part.tolist() for part in np.array_split(np.array(order), GROUPS)]
    return tuple(LayerGroup(layers=tuple(sorted(part))) for part in parts)
