"""Coefficients of the program: choices of a plan and their costs. Misses fall with resident shares
along a convex curve, replaced by tangents; the rest is discrete."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import Literal

import numpy as np

from pi2.costs.activity import LOOK_AHEAD_MODES, LayerActivity, PredictorMode, describe_activity
from pi2.costs.cost_layer import cost_layer
from pi2.costs.description import Activity
from pi2.costs.kernel_times import Rates
from pi2.costs.reads import IoChoice, list_io_choices
from pi2.costs.settings import (
    POSITION,
    LookAhead,
    Settings,
    Sizes,
    count_run,
    find_range_bytes,
    measure_sizes,
    read_stored,
)
from pi2.costs.terms import time_head, time_row
from pi2.fitting.budget import MIB, count_runtime
from pi2.fitting.completion import resolve_values
from pi2.fitting.sizes import find_needs
from pi2.memory.arena import describe_context
from pi2.plan.arithmetic.costs import SHORT_CHUNK, list_chunks
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.documents.device import UnitKind
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import BundleLayout, round_up
from pi2.planning.wish import Wish, make_plan_values

GROUPS = 8
"""Layers whose activity is alike share their settings, in so many groups at most."""
CACHE_SHARES = (0.1, 0.25, 0.5)
"""Parts of the resident neurons that may be a cache."""
STREAM_SHARE = 1e-9
"""Cache share where every neuron is computed and absent ones stream by: no cache."""
AHEAD: tuple[LookAhead, ...] = ("none", "layer")
"""When reads may begin."""
_LEAST_DENSE = 1e-9
"""Share of a dense unit that computes next to nothing."""
_GRID = np.linspace(0.0, 1.0, 17)
_STREAMS = IoChoice(engine="io_uring", threads=1, depth=128, neuron_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers with the same settings."""

    layers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to find the active neurons, with an amount of cache: curves per group of layers."""

    predictor: PredictorMode
    cache_share: float
    """Part of the resident neurons; 0 means that every neuron stays."""
    predictor_bytes: int
    least_cold_bytes: int
    lines: tuple[tuple[tuple[float, float], ...], ...]
    """Per group: (slope, offset) of missing neurons over the resident share."""
    fixed_s: tuple[float, ...]
    """Per group: attention, norm, prediction, look-up."""
    compute_s: tuple[float, ...]
    """Per group: computing all active neurons on the CPU."""
    dense_lines: tuple[tuple[tuple[float, float], ...], ...]
    """Per group: (slope, offset) of the CPU's time over the share that a dense unit computes."""
    missing_s: float
    """Cost of a missing neuron apart from its read: its place in the cache."""
    ahead_s: float
    """Norms and predictor of a layer: reads that begin a layer ahead are hidden behind them."""
    neuron_s: tuple[float, ...]
    """Per group: reading streamed neurons, for any engine; 0 if the engine's choice counts."""
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
    """All choices that the solver has, with their costs."""

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
    attention_s: float
    """Attention of a layer, that looking ahead hides reads behind."""
    embeddings: tuple[EmbeddingChoice, ...]
    head_s: float
    activities: Mapping[PredictorMode, Activity]
    by_expert: bool = False
    """Whether the store's order puts an expert's neurons together."""

    @property
    def stride(self) -> int:
        return self.bundle.stride

    @property
    def unit_bytes(self) -> int | None:
        """Bytes of the dense unit's own memory; None where it uses main memory."""
        dense = self.rates.dense
        memory = None if dense is None else self.wish.device.units[dense.name].memory
        if dense is None or memory is None:
            return None
        return self.wish.unit_memory.get(dense.name, memory.capacity or 0)

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
    sizes = measure_sizes(model, modes[0], "fp16", bundle)
    settings = _make_settings(wish, modes[0], rates, "fp16")
    bare = cost_layer(rates, sizes, settings, activities[modes[0]][0][0], hot=1.0, cold=0.0)
    listed = []
    for mode in modes:
        shares = [0.0] if rates.flash is None else [0.0, *CACHE_SHARES]
        if mode == "none" and rates.flash is not None:
            shares = [0.0, STREAM_SHARE]
        if mode == "router" and rates.flash is not None:
            # Which experts will be used, the cache finds out better than anybody knows before.
            shares = [0.0, 1.0]
        for share in shares:
            own = activities[mode][0]
            listed.append(_pose_mode(wish, rates, mode, cheapest, share, own, groups, bundle))
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
        attention_s=bare.attention_s,
        embeddings=_list_embeddings(wish, rates, modes[0], bundle),
        head_s=time_head(rates, sizes, settings),
        activities=activities,
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


def _make_settings(wish: Wish, mode: PredictorMode, rates: Rates, kv: KvType) -> Settings:
    return Settings(
        predictor=mode,
        kv=kv,
        threads=rates.cores,
        look_ahead="none",
        policy="lfu",
        reads=None,
        position=min(POSITION, wish.context),
        batch=wish.batch,
        attention_share=rates.fair_share,
        head_share=rates.fair_share,
        leave_out=wish.leave_out if mode == "low-rank" else 0.0,
    )


def _pose_mode(
    wish: Wish,
    rates: Rates,
    mode: PredictorMode,
    kv: KvType,
    cache_share: float,
    activities: Sequence[LayerActivity],
    groups: Sequence[LayerGroup],
    bundle: BundleLayout,
) -> Mode:
    model = wish.model
    rates = rates.choose(kv)
    resolved = _resolve(wish, mode, "fp16", SHORT_CHUNK, bundle)
    lines, fixed, compute, dense = [], [], [], []
    neuron_s, shares = [], []
    stream_s = 0.0 if rates.flash is None else bundle.stride / rates.flash.find_stream_rate()
    ahead_s = 0.0
    for group in groups:
        middle = group.layers[len(group.layers) // 2]
        # Layers whose neurons nobody names stream by.
        is_named = middle in resolved.named_layers
        own: PredictorMode = mode if is_named else "none"
        streams = cache_share > 0.0 and not is_named
        part = STREAM_SHARE if streams else cache_share
        neuron_s.append(stream_s if streams else 0.0)
        shares.append(part)
        settings = _make_settings(wish, own, rates, kv)
        sizes = measure_sizes(model, own, "fp16", bundle)
        cheap = measure_sizes(model, own, settings.kv, bundle)
        activity = activities[middle]
        # With a dense unit, attention is divided between both, whatever its share of neurons.
        helped = _LEAST_DENSE if rates.dense is not None and model.moe is None else 0.0
        all_hot = cost_layer(rates, cheap, settings, activity, hot=1.0, cold=0.0, dense=helped)
        fixed.append(all_hot.total_s - max(all_hot.compute_s, all_hot.dense_s))
        compute.append(all_hot.compute_s)
        ahead_s = all_hot.norm_s + all_hot.predict_s
        missing = [
            0.0
            if cache_share == 0.0
            else cost_layer(
                rates,
                sizes,
                settings,
                activity,
                hot=float(share) * (1.0 - part),
                cold=float(share) * part,
            ).missing
            for share in _GRID
        ]
        lines.append(_draw_lines(_GRID.tolist(), missing))
        dense.append(_draw_dense_lines(rates, sizes, settings, activity, model))
    return Mode(
        predictor=mode,
        cache_share=cache_share,
        predictor_bytes=round_up(find_needs(resolved).predictor.bytes, MIB),
        least_cold_bytes=0 if cache_share == 0.0 else find_needs(resolved).cold.bytes,
        lines=tuple(lines),
        fixed_s=tuple(fixed),
        compute_s=tuple(compute),
        dense_lines=tuple(dense),
        missing_s=0.0 if mode == "none" else 1.0 / rates.look_up.bytes_s,
        ahead_s=ahead_s,
        neuron_s=tuple(neuron_s),
        cache_shares=tuple(shares),
    )


def _draw_dense_lines(
    rates: Rates, sizes: Sizes, settings: Settings, activity: LayerActivity, model: Model
) -> tuple[tuple[float, float], ...]:
    """The CPU's time over the share that a dense unit computes; empty without such a unit."""
    if rates.dense is None or model.moe is not None:
        return ()
    times = [
        cost_layer(
            rates, sizes, settings, activity, hot=1.0, cold=0.0, dense=float(share)
        ).compute_s
        for share in _GRID
    ]
    return _draw_lines(_GRID.tolist(), times)


def _draw_lines(xs: Sequence[float], ys: Sequence[float]) -> tuple[tuple[float, float], ...]:
    hull: list[tuple[float, float]] = []
    for point in zip(xs, ys, strict=True):
        while len(hull) >= 2 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(
        ((y1 - y0) / (x1 - x0), y0 - (y1 - y0) / (x1 - x0) * x0)
        for (x0, y0), (x1, y1) in pairwise(hull)
    )


def _turns_down(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _group_layers(activities: Sequence[LayerActivity]) -> tuple[LayerGroup, ...]:
    keys = [round(item.used - item.count_within(0.5), 6) for item in activities]
    kinds = sorted(set(keys))
    if len(kinds) <= GROUPS:
        parts = [[n for n, key in enumerate(keys) if key == kind] for kind in kinds]
    else:
        order = sorted(range(len(keys)), key=lambda number: (keys[number], number))
        parts = [part.tolist() for part in np.array_split(np.array(order), GROUPS)]
    return tuple(LayerGroup(layers=tuple(sorted(part))) for part in parts)
