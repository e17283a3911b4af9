"""A plan's choices that time depends on, and the bytes that a layer reads for a token."""

from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from pi2.arrays import F64
from pi2.costs.activity import Policy, PredictorMode
from pi2.costs.kernel_times import Rates
from pi2.costs.rates import check_flash
from pi2.costs.reads import Reads, find_reads
from pi2.diagnostics import UserError
from pi2.fitting import list_graph_tokens
from pi2.memory.arena import MEAN_TOKENS, count_lent_bytes
from pi2.model.blocks import count_indexes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import choose_request_bytes, count_staged_neurons, find_block_bytes
from pi2.plan.arithmetic.units import (
    count_index_bytes,
    count_kv_token_bytes,
    count_mixer_bytes,
    count_mixer_weights,
    count_state_traffic,
)
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import BundleLayout, ScalesPlace, matrix_bytes, round_up, weight_bytes
from pi2.store.manifest import Order, read_manifest


class StoredLayout(NamedTuple):
    """Bundle layout of an existing neuron store."""

    stride: int
    scales: ScalesPlace
    order: Order


def read_stored(store: Path | None) -> StoredLayout | None:
    """Layout of a store; None where there is none, or one that cannot be read."""
    with suppress(UserError):
        if store is not None:
            manifest = read_manifest(store)
            return StoredLayout(manifest.bundle.stride, manifest.bundle.scales, manifest.order)
    return None


def find_range_bytes(model: Model, stride: int, store: Path | None = None) -> int:
    """Range of the file that a token's reads span: a layer, or an expert's neurons if stored so."""
    stored = read_stored(store) if model.moe is not None else None
    apart = stored is not None and stored.order != "expert"
    return (model.layer_neurons if apart else model.shape.ffn) * stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a layer reads for a token."""

    projections: int
    kv_token: float
    index_token: float
    """Of a token that an index passes over: its key in the index."""
    reach: int
    """Tokens of which every key is read; without an index, the longest context."""
    predictor: float
    predictors: int
    """Calls that find active neurons: one for each active expert."""
    experts: int
    """Experts that a router chooses among; 0 without."""
    neuron: int
    """Weights and scales of a neuron that is computed."""
    dense_neuron: int
    """Weights of a neuron on an NPU, which has one scale for a whole row."""
    bundle: BundleLayout
    """A neuron as the store has it."""
    head: int
    head_weights: int
    predictor_weights: int
    neuron_weights: int
    projection_weights: int
    """Number of weights of attention and of an FFN next to experts, for arithmetic."""
    hidden: int


def measure_sizes(model: Model, mode: PredictorMode, kv: KvType, bundle: BundleLayout) -> Sizes:
    """Bytes of a layer: of its active experts, if it has experts."""
    shape, precision, width = model.shape, model.quantization, model.stored_neuron_width
    active = model.token_neurons / (shape.layers * shape.ffn)
    projections = count_mixer_bytes(model) + count_state_traffic(model)
    neuron = bundle.neuron_bytes
    predictor, predictor_weights = 0.0, 0
    if mode == "gate":
        predictor = active * (shape.ffn * bundle.gate_bytes)
        predictor_weights = round(active * shape.ffn * width)
        every = (len(bundle.parts) - 1) * bundle.gate_bytes + bundle.down_bytes
        neuron -= neuron * bundle.gate_bytes // every  # gates are known then
    elif mode == "low-rank" and model.predictor is not None:
        rank = model.predictor.rank
        predictor = matrix_bytes(rank, width, precision.predictor)
        predictor += matrix_bytes(shape.ffn, rank, precision.predictor)
        predictor *= active
        predictor_weights = round(active * rank * (width + shape.ffn))
    head = precision.embedding if model.tied_head else precision.head
    index, index_token = model.attention.index, 0
    if index is not None:
        index_token = count_indexes(model) * index.width * count_index_bytes(kv) // shape.layers
    return Sizes(
        projections=projections,
        kv_token=count_kv_token_bytes(model, kv) - index_token,
        index_token=index_token,
        reach=shape.context if index is None else index.reach,
        predictor=predictor,
        predictors=round(active) if predictor else 0,
        experts=0 if model.moe is None else model.moe.experts,
        neuron=neuron,
        bundle=bundle,
        dense_neuron=sum(weight_bytes(width, part.precision) for part in bundle.parts),
        head=matrix_bytes(shape.vocab, shape.stored_hidden, head),
        head_weights=shape.vocab * shape.stored_hidden,
        predictor_weights=predictor_weights,
        neuron_weights=len(bundle.parts) * width,
        projection_weights=count_mixer_weights(model),
        hidden=shape.stored_hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """How fast pieces come from flash."""

    byte_s: float
    """Seconds of a byte, in reads of a piece's size."""
    overlap: float
    """Part of the shorter one of reading and computing that both at once save."""
    neurons: int
    """Number of neurons of a piece."""
    stride: int

    def count_pieces(self, absent: float) -> float:
        """Number of pieces that hold ``absent`` neurons."""
        return float(ceil(absent / self.neurons - 1e-9)) if absent > 0.0 else 0.0

    def time_wait(self, pieces: float, read_s: float, before_s: float, compute_s: float) -> float:
        """Seconds of a layer beyond arithmetic, which takes ``before_s`` and ``compute_s`` with the
        ``pieces`` that are read in ``read_s``."""
        if pieces == 0:
            return 0.0
        each_s, piece_s = read_s / pieces, compute_s / pieces
        first = each_s - self.overlap * min(before_s + piece_s, each_s)
        return first + (pieces - 1.0) * (each_s - self.overlap * min(piece_s, each_s))


def find_stream(resolved: ResolvedPlan, rates: Rates) -> Stream:
    """The stream of a plan's layers; ``UserError`` P351 where reads were not measured."""
    flash = check_flash(rates, resolved.device)
    neurons = count_staged_neurons(resolved)
    stride = resolved.bundle.stride
    return Stream(
        byte_s=1.0 / flash.find_stream_rate(neurons * stride),
        overlap=rates.stream_overlap,
        neurons=neurons,
        stride=stride,
    )


Number = TypeVar("Number", float, F64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Most experts that a layer reads for a token, by the table ``[experts]``."""

    read_best: float
    """Mean share of a token's missing experts that are read; misses fall on all ranks alike."""
    most_reads: float

    def limit(self, missing: Number) -> Number:
        """Experts that are read of ``missing`` ones."""
        kept = np.minimum(np.asarray(missing) * self.read_best, self.most_reads)
        return kept if isinstance(missing, np.ndarray) else float(kept)


def read_limits(resolved: ResolvedPlan) -> ReadLimits | None:
    """The plan's limits of reads; None if all chosen experts are read."""
    plan, model = resolved.plan, resolved.model
    if model.moe is None or plan.decode.predictor != "router":
        return None
    best, most = plan.experts.list_read_best(model.shape.layers), plan.experts.most_reads
    if most is None and not any(number is not None for number in best):
        return None
    chosen = model.moe.active_experts
    parts = [1.0 if number is None else min(number / chosen, 1.0) for number in best]
    return ReadLimits(
        read_best=sum(parts) / len(parts), most_reads=float(chosen if most is None else most)
    )


LookAhead = Literal["none", "attention", "layer"]
POSITION = MEAN_TOKENS
"""Tokens of context that a mean token has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A plan's choices, as far as time depends on them."""

    sizes: Sizes
    predictor: PredictorMode
    threads: int
    look_ahead: LookAhead
    policy: Policy
    reads: Reads | None
    """How missing neurons are read; None where nothing is read, or everything streams by."""
    stream: Stream | None = None
    """How layers stream by, if every neuron is computed."""
    position: int = POSITION
    batch: int = 1
    """Sequences that generate at the same time."""
    rounds_steps: bool = False
    """Whether several of them are multiplied by the upper 8 of their activations' 16 bits."""
    attention_share: float = 0.0
    """Part of the rows of attention's projections that the dense unit computes."""
    head_share: float = 0.0
    """The same of the head."""
    graphs: tuple[int, ...] = ()
    """Numbers of tokens, ascending, that the dense unit computes; none for any number."""
    leave_out: float = 0.0
    """Share of the predictor's scores that may be left out instead of read."""
    limits: ReadLimits | None = None
    """Most experts that are read, if a plan deviates from routing."""

    @property
    def is_predicted(self) -> bool:
        """Whether only predicted neurons are computed."""
        return self.predictor != "none"


def read_settings(
    resolved: ResolvedPlan, rates: Rates, position: int, store: Path | None, *, named: bool
) -> Settings:
    """Settings of a plan with read times, of layers with ``named`` neurons or the others."""
    plan = resolved.plan
    predictor: PredictorMode = plan.decode.predictor if named else "none"
    numbers = resolved.named_layers if named else resolved.whole_layers
    layers = [resolved.layers[number] for number in numbers] or resolved.layers
    whole, colds = all(layer.hot >= 1.0 for layer in layers), share_cold(resolved, position)
    reads = stream = None
    if predictor == "none":
        # What does not stay streams by, whatever the cache has room for.
        stream = None if whole else find_stream(resolved, rates)
    elif not whole and not all(
        resolved.layers[number].hot + colds[number] >= 1.0 - 1e-9
        for number in resolved.named_layers
    ):
        wanted = Reads(
            engine=plan.io.engine,
            threads=plan.io.threads,
            cluster=plan.pipeline.cluster,
            overlap=rates.overlap,
            merge_gap=_find_merge_gap(resolved, store),
            phases=_divide_bundle(resolved, rates),
            stride=resolved.bundle.stride,
            run=count_run(resolved),
            place_s=rates.room_s,
        )
        flash = check_flash(rates, resolved.device)
        reach = find_range_bytes(resolved.model, wanted.stride, store)
        streams = not rates.measured
        reads = find_reads(flash, reach, wanted, depth=plan.io.depth, streams=streams)
    rows = plan.projections
    dense = None if rates.dense is None else rates.dense.name
    return Settings(
        sizes=measure_sizes(resolved.model, predictor, plan.kv.type, resolved.bundle),
        predictor=predictor,
        threads=plan.threads.compute or rates.cores,
        # Where nothing is read there is nothing to look ahead for.
        look_ahead="none" if reads is None else plan.decode.look_ahead,
        policy=plan.cache.policy,
        reads=reads,
        stream=stream,
        position=min(position, plan.kv.context),
        batch=plan.decode.batch,
        rounds_steps=(plan.decode.activations, plan.decode.batch_activations) == ("int16", "int8"),
        attention_share=(rows.attention or {}).get(dense, 0.0) if dense else 0.0,
        head_share=(rows.head or {}).get(dense, 0.0) if dense else 0.0,
        graphs=list_dense_graphs(resolved, rates),
        leave_out=plan.decode.leave_out or 0.0,
        limits=read_limits(resolved),
    )


def list_dense_graphs(resolved: ResolvedPlan, rates: Rates) -> tuple[int, ...]:
    """Token counts of the dense unit's graphs, ascending; none if it takes any number."""
    dense = rates.dense
    if dense is None or dense.name not in resolved.dense_units:
        return ()
    return list_graph_tokens(resolved, dense.name)


def count_run(resolved: ResolvedPlan) -> int:
    """Neurons of an expert that one request reads; 1 where neurons are read one by one."""
    if resolved.plan.decode.predictor != "router":
        return 1
    size = choose_request_bytes(resolved.device) // resolved.bundle.stride
    return max(min(resolved.model.shape.ffn, size), 1)


def _find_merge_gap(resolved: ResolvedPlan, store: Path | None) -> int | None:
    """The plan's gap if an MoE model's neurons lie by expert; else few neighbours are missing."""
    plan, stored = resolved.plan, read_stored(store)
    if resolved.model.moe is None or plan.pipeline.phases != 1 or plan.decode.predictor == "router":
        return None
    return plan.io.merge_gap if stored is not None and stored.order == "expert" else None


def _divide_bundle(resolved: ResolvedPlan, rates: Rates) -> tuple[int, float] | None:
    """Two reads of a neuron, if the plan has them; pi2 measures reads of whole ones, and a router
    has experts read whole."""
    bundle, plan = resolved.bundle, resolved.plan
    is_whole = plan.pipeline.phases == 1 or plan.decode.predictor == "router"
    if is_whole or rates.measured or not bundle.is_gated:
        return None
    first = round_up(bundle.first_bytes, find_block_bytes(resolved.device))
    return None if first >= bundle.stride else (first, rates.constants.up_down_share)


def share_cold(resolved: ResolvedPlan, position: int = POSITION) -> list[float]:
    """Share of each layer's neurons in the cache after ``position`` tokens."""
    neurons = resolved.model.layer_neurons
    absent = [neurons - layer.hot_neurons for layer in resolved.layers]
    for layer in resolved.whole_layers if resolved.named_layers else ():
        absent[layer] = 0
    room = resolved.plan.memory.segments.cold + count_lent_bytes(resolved, position)
    slots = min(room // resolved.bundle.stride, sum(absent))
    return [count * slots / sum(absent) / neurons if sum(absent) else 0.0 for count in absent]
