"""Time of a generated token and of a prompt, as a sum of terms that can be looked at.

Every term names where it comes from; docs/planning.md explains them.  A layer of a token:

    attention  weights of the projections, and keys and values of the context
    norm       what the FFN begins and ends with
    predict    finding the active neurons
    look up    the neuron cache: a fixed part, and one for every missing neuron
    compute    active neurons in memory, then those that were read
    dense      neurons that an NPU or GPU computes beside the CPU
    read       missing neurons from flash
    wait       the part of ``read`` that no computation hides

A layer takes attention + norm + predict + look up + max(compute, dense) + wait.  Expected values
stand for what varies from token to token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from pi2.plan.layout import matrix_bytes, round_up, vector_bytes, weight_bytes
from pi2.plan.model import Model
from pi2.plan.plan import KvType
from pi2.plan.resolved import Resolved, ResolvedPlan
from pi2.plan.sizes import count_kv_token_bytes, find_block_bytes
from pi2.planning.activity import (
    LayerActivity,
    Policy,
    PredictorMode,
    describe_activity,
    describe_cut_activity,
)
from pi2.planning.rates import (
    Linear,
    Rates,
    check_flash,
    find_stream_overlap,
    find_stream_rate,
    read_rates,
)
from pi2.planning.storage_choice import Phases, Reads, find_reads
from pi2.simulate.constants import Constants

LookAhead = Literal["none", "attention", "layer"]
RUNTIME_BYTES = 81 << 20
"""Python and libraries of a run with the cpu backend whose kernels are compiled already: resident
set of the demo model's run, less what its segments hold."""
NEURON_TABLE_BYTES = 36
"""What the cache knows of a neuron: its slot, its owner, how often it is used, and copies of it.
From the resident set of a 7B's run, less that of the demo model's."""
Activity = tuple[tuple[LayerActivity, ...], str]
"""Of every layer, and where it is known from."""
POSITION = 256
"""Tokens of context that a mean token is taken to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a layer reads for a token."""

    projections: int
    kv_token: float
    predictor: float
    neuron: int
    """Weights and scales of a neuron that is computed."""
    dense_neuron: int
    """The same on a dense unit."""
    stride: int
    head: int
    head_weights: int
    predictor_weights: int
    neuron_weights: int
    projection_weights: int
    """Number of weights of attention, for arithmetic."""
    hidden: int
    is_gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A plan's choices, as far as time depends on them."""

    predictor: PredictorMode
    kv: KvType
    threads: int
    look_ahead: LookAhead
    policy: Policy
    reads: Reads | None
    """How missing neurons are read; None where nothing is read, or everything streams by."""
    stream_neuron_s: float = 0.0
    """A neuron of a layer that streams by, where every neuron is computed."""
    position: int = POSITION
    batch: int = 1
    """Sequences that generate at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Seconds of one layer of a token, and the neurons behind them."""

    attention_s: float
    norm_s: float
    predict_s: float
    look_up_s: float
    compute_s: float
    dense_s: float
    read_s: float
    wait_s: float
    used: float
    missing: float
    hot_bytes: int

    @property
    def total_s(self) -> float:
        """The layer's part of the token."""
        shared = self.attention_s + self.norm_s + self.predict_s + self.look_up_s
        return shared + max(self.compute_s, self.dense_s) + self.wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a plan costs."""

    layers: tuple[LayerCost, ...]
    head_s: float
    prefill_tokens_s: float | None
    """None where no arithmetic rate is known."""
    memory_bytes: int
    """Expected peak: everything that is resident once the caches are full."""
    activity: str
    """Where the activity of neurons is known from."""
    sources: dict[str, str]
    predictor: PredictorMode = "none"
    batch: int = 1
    power_w: float | None = None
    """Of the processor; None where the device does not state it."""
    both_w: float | None = None
    """Of everything while the dense unit computes, too."""

    @property
    def token_s(self) -> float:
        """Seconds between two tokens of a sequence."""
        return sum(layer.total_s for layer in self.layers) + self.head_s

    @property
    def tokens_s(self) -> float:
        """Generated tokens per second, in all sequences."""
        return self.batch / self.token_s

    @property
    def token_j(self) -> float | None:
        """Joules of a generated token: the processor takes its power all the time, the other unit
        adds its own while it computes."""
        if self.power_w is None:
            return None
        dense_s = sum(layer.dense_s for layer in self.layers)
        added = ((self.both_w or self.power_w) - self.power_w) * min(dense_s, self.token_s)
        return (self.power_w * self.token_s + added) / self.batch

    @property
    def hit_rate(self) -> float:
        """Share of the neurons used that are in memory."""
        used = sum(layer.used for layer in self.layers)
        return 1.0 - sum(layer.missing for layer in self.layers) / used if used else 1.0


def measure_sizes(model: Model, mode: PredictorMode, kv: KvType, stride: int) -> Sizes:
    """Bytes of a layer: of its active experts, where it has experts."""
    shape, precision = model.shape, model.quantization
    query = shape.heads * shape.head_dim
    qkv = query + 2 * shape.kv_heads * shape.head_dim
    active = model.active_experts
    projections = matrix_bytes(qkv, shape.hidden, precision.attention)
    projections += matrix_bytes(shape.hidden, query, precision.attention)
    bundle = model.lay_out_bundle(stride)
    neuron = bundle.used_bytes
    predictor = predictor_weights = 0
    if mode == "gate":
        predictor = active * matrix_bytes(shape.ffn, shape.hidden, precision.ffn)
        predictor_weights = active * shape.ffn * shape.hidden
        neuron -= neuron // len(bundle.parts)  # gates are known then
    elif mode == "low-rank" and model.predictor is not None:
        rank = model.predictor.rank
        predictor = matrix_bytes(rank, shape.hidden, precision.predictor)
        predictor += matrix_bytes(shape.ffn, rank, precision.predictor)
        predictor *= active
        predictor_weights = active * rank * (shape.hidden + shape.ffn)
    head = precision.embedding if model.tied_head else precision.head
    return Sizes(
        projections=projections,
        kv_token=count_kv_token_bytes(model, kv),
        predictor=predictor,
        neuron=neuron,
        dense_neuron=len(bundle.parts) * weight_bytes(shape.hidden, precision.ffn),
        stride=stride,
        head=matrix_bytes(shape.vocab, shape.hidden, head),
        head_weights=shape.vocab * shape.hidden,
        predictor_weights=predictor_weights,
        neuron_weights=len(bundle.parts) * shape.hidden,
        projection_weights=qkv * shape.hidden + shape.hidden * query,
        hidden=shape.hidden,
        is_gated=bundle.is_gated,
    )


def cost_layer(
    rates: Rates,
    sizes: Sizes,
    settings: Settings,
    activity: LayerActivity,
    *,
    hot: float,
    cold: float,
    dense: float = 0.0,
) -> LayerCost:
    """One layer of a token: ``hot`` of its neurons stay, a cache holds ``cold``, a dense unit
    computes the hottest ``dense``."""
    speed, batch = rates.scale(settings.threads), settings.batch
    shared = rates.shared_bytes_s / rates.project.bytes_s if dense > 0 else 1.0
    attention = _time_matrix(
        rates, rates.project, sizes.projections, sizes.projection_weights, batch
    ) / max(shared, 1.0)
    attention += batch * settings.position * sizes.kv_token / rates.attend.bytes_s
    predict = _time_matrix(rates, rates.predict, sizes.predictor, sizes.predictor_weights, batch)
    if settings.predictor == "none":
        used = float(activity.neurons) * activity.chosen
        # What does not stay is streamed, layer after layer, whatever the cache holds.
        missing = used * (1.0 - hot)
        look_up = 0.0
    else:
        used = activity.used
        missing = min(activity.count_missing(hot, cold, settings.policy), used)
        # Of a layer that is all hot, nothing is looked up.
        look_up = 0.0
        if hot < 1.0:
            look_up = rates.look_up.call_s + missing / rates.look_up.bytes_s
    dense_neurons = activity.neurons * activity.chosen * dense
    computed = max(used - activity.count_within(dense), 0.0) if dense > 0 else used
    dense_s = 0.0
    slow = 1.0
    if dense_neurons > 0 and rates.dense is not None:
        together = rates.dense.bytes_s + rates.gather.bytes_s
        slow = max(1.0, together / rates.shared_bytes_s)
        dense_s = rates.dense.launch_s
        seconds = dense_neurons * sizes.dense_neuron / rates.dense.bytes_s * slow
        if rates.dense.ops_s is not None:
            operations = 2.0 * batch * dense_neurons * sizes.neuron_weights
            seconds = max(seconds, operations / rates.dense.ops_s)
        dense_s += seconds
    resident = max(computed - missing, 0.0)
    per_neuron = _count_neuron_bytes(rates, sizes, settings, activity) / rates.gather.bytes_s
    per_neuron *= slow / speed
    reads = settings.reads
    parts = reads.count_parts(missing) if reads is not None else 1.0
    calls = (resident >= 1.0) + (parts if missing > 0 else 0.0)
    compute = (resident + missing) * per_neuron + calls * rates.gather.call_s
    attention_s = attention / speed
    busy = max(compute, dense_s)
    hidden_s = _find_hidden(settings, attention_s, busy, missing * per_neuron / parts)
    read, overlap = missing * settings.stream_neuron_s, find_stream_overlap(rates)
    if reads is not None:
        read, overlap = reads.time(missing), reads.overlap
    elif missing > 0 and rates.flash is not None:
        read += rates.flash.latency_s
    return LayerCost(
        attention_s=attention_s,
        norm_s=rates.norm_s,
        predict_s=predict / speed,
        look_up_s=look_up,
        compute_s=compute,
        dense_s=dense_s,
        read_s=read,
        wait_s=read - overlap * min(read, max(hidden_s, 0.0)),
        used=used,
        missing=missing,
        hot_bytes=round(hot * activity.neurons) * sizes.stride,
    )


def _time_matrix(
    rates: Rates, kernel: Linear, size_bytes: float, weights: int, batch: int
) -> float:
    """A matrix for a batch: read once, but computed for every sequence."""
    seconds = kernel.time(size_bytes)
    if batch > 1 and rates.few_ops_s is not None:
        seconds = max(seconds, kernel.call_s + 2.0 * batch * weights / rates.few_ops_s)
    return seconds


def _count_neuron_bytes(
    rates: Rates, sizes: Sizes, settings: Settings, activity: LayerActivity
) -> float:
    """Bytes of a neuron that are read on average: up only behind an open gate, down only if the
    neuron fires.  Unmeasured devices have a rate for whole neurons."""
    if not rates.measured or not sizes.is_gated or settings.predictor == "none":
        return float(sizes.neuron)
    if settings.predictor == "gate":
        return sizes.neuron * (1.0 + activity.fired) / 2
    return sizes.neuron * (1.0 + activity.opened + activity.fired) / 3


def _find_hidden(settings: Settings, attention_s: float, compute_s: float, last_s: float) -> float:
    """Seconds of reading during which the processor has something to do.

    The last part of what is read is computed, in ``last_s``, when reading is over.  Looking ahead,
    attention goes on meanwhile, or everything of a layer does.
    """
    match settings.look_ahead:
        case "none":
            return compute_s - last_s
        case "attention":
            return attention_s + compute_s - last_s
        case "layer":
            return attention_s + compute_s


def cost_plan(resolved: ResolvedPlan, rates: Rates | None = None) -> Cost:
    """What a plan costs on its device.

    Raises `UserError` P351 where the device lacks figures.
    """
    return cost_resolved(resolved, rates or read_rates(resolved.device), store=resolved.store_path)


def cost_resolved(
    resolved: Resolved,
    rates: Rates,
    *,
    store: Path | None = None,
    activity: Activity | None = None,
) -> Cost:
    """The same for a plan that has no file yet; ``store``: the folder of its neuron store;
    ``activity``: what `describe_activity` says of it, where that is known already."""
    plan, model = resolved.plan, resolved.model
    mode = plan.decode.predictor
    stride = resolved.bundle.stride
    sizes = measure_sizes(model, mode, plan.kv.type, stride)
    batch = plan.decode.batch
    if activity is None and mode == "gate" and resolved.thresholds is not None:
        activity = describe_cut_activity(model, resolved.thresholds, batch=batch)
    elif activity is None:
        activity = describe_activity(model, mode, store, batch=batch)
    uses, source = activity
    settings = read_settings(resolved, rates)
    colds = share_cold(resolved)
    layers = []
    known: dict[tuple[int, float, float, float], LayerCost] = {}
    for number, layer in enumerate(resolved.layers):
        dense = sum(
            share
            for name, share in layer.split.items()
            if resolved.device.units[name].kind != "cpu"
        )
        key = (id(uses[number]), layer.hot, colds[number], dense)
        if key not in known:
            known[key] = cost_layer(
                rates,
                sizes,
                settings,
                uses[number],
                hot=layer.hot,
                cold=colds[number],
                dense=min(dense, layer.hot),
            )
        layers.append(known[key])
    return Cost(
        layers=tuple(layers),
        head_s=time_head(rates, sizes, batch) / rates.scale(settings.threads),
        prefill_tokens_s=cost_prefill(resolved, rates, sizes),
        memory_bytes=count_memory(resolved),
        activity=source,
        sources=rates.sources,
        predictor=mode,
        batch=batch,
        power_w=rates.power_w,
        both_w=rates.both_w if _uses_dense(resolved) else rates.power_w,
    )


def time_head(rates: Rates, sizes: Sizes, batch: int) -> float:
    """Seconds of the output head of a step."""
    return _time_matrix(rates, rates.multiply, sizes.head, sizes.head_weights, batch)


def read_settings(resolved: Resolved, rates: Rates) -> Settings:
    """A plan's settings, with the time that reading a neuron takes."""
    plan = resolved.plan
    whole = all(layer.hot >= 1.0 for layer in resolved.layers)
    reads, stream_neuron_s = None, 0.0
    if not whole and not _fits_cache(resolved):
        flash = check_flash(rates, resolved.device)
        if plan.decode.predictor == "none":
            stream_neuron_s = resolved.bundle.stride / find_stream_rate(flash)
        else:
            reads = find_reads(
                flash,
                resolved.bundle.stride,
                resolved.model.layer_neurons * resolved.bundle.stride,
                engine=plan.io.engine,
                threads=plan.io.threads,
                depth=plan.io.depth,
                cluster=plan.pipeline.cluster,
                overlap=rates.overlap,
                phases=_divide_bundle(resolved, rates),
            )
    return Settings(
        predictor=plan.decode.predictor,
        kv=plan.kv.type,
        threads=plan.threads.compute or rates.cores,
        look_ahead=plan.decode.look_ahead,
        policy=plan.cache.policy,
        reads=reads,
        stream_neuron_s=stream_neuron_s,
        position=min(POSITION, plan.kv.context),
        batch=plan.decode.batch,
    )


def _divide_bundle(resolved: Resolved, rates: Rates) -> Phases | None:
    """Two reads of a neuron, where the plan has them; pi2's own engine reads it at once."""
    bundle = resolved.bundle
    if resolved.plan.pipeline.phases == 1 or rates.measured or not bundle.is_gated:
        return None
    gate = vector_bytes(bundle.hidden, bundle.precision)
    first = round_up(gate, find_block_bytes(resolved.device))
    if first >= bundle.stride:
        return None
    return Phases(gate_bytes=first, open_share=Constants().up_down_share)


def share_cold(resolved: Resolved) -> list[float]:
    """Part of each layer's neurons that the cache holds: in proportion to what is not hot."""
    neurons = resolved.model.layer_neurons
    absent = [neurons - layer.hot_neurons for layer in resolved.layers]
    slots = min(resolved.plan.memory.segments.cold // resolved.bundle.stride, sum(absent))
    return [count * slots / sum(absent) / neurons if sum(absent) else 0.0 for count in absent]


def _fits_cache(resolved: Resolved) -> bool:
    colds = share_cold(resolved)
    return all(
        layer.hot + cold >= 1.0 - 1e-9 for layer, cold in zip(resolved.layers, colds, strict=True)
    )


def cost_prefill(resolved: Resolved, rates: Rates, sizes: Sizes) -> float | None:
    """Tokens per second of a full chunk: arithmetic, while what is not hot streams by, as far as
    the cores can do both."""
    model, plan = resolved.model, resolved.plan
    ops = rates.ops_s
    if rates.dense is not None and rates.dense.ops_s is not None and _uses_dense(resolved):
        ops = rates.dense.ops_s
    project_ops = rates.project_ops_s if ops == rates.ops_s else ops
    if ops is None or project_ops is None:
        return None
    tokens = plan.prefill.chunk
    active = model.active_experts
    ffn_weights = active * model.shape.ffn * sizes.hidden * 3
    total = 0.0
    for layer in resolved.layers:
        compute = 2.0 * tokens * sizes.projection_weights / project_ops
        compute += 2.0 * tokens * ffn_weights / ops
        read = 0.0
        if layer.hot < 1.0:
            absent = (model.layer_neurons - layer.hot_neurons) * sizes.stride
            read = absent / find_stream_rate(check_flash(rates, resolved.device))
        total += compute + read - find_stream_overlap(rates) * min(compute, read)
    return tokens / total


def _uses_dense(resolved: Resolved) -> bool:
    units = resolved.device.units
    return any(units[name].kind != "cpu" for layer in resolved.layers for name in layer.split)


def count_memory(resolved: Resolved, tokens: int = POSITION) -> int:
    """Bytes that are resident after ``tokens`` of context: what the segments need, and the cache.

    Of keys and values only what was used is.
    """
    segments = resolved.plan.memory.segments
    needs = dict(resolved.needs.items())
    fixed = sum(needs[name].bytes for name in ("attention", "kv", "predictor", "hot", "workspace"))
    stride = resolved.bundle.stride
    absent = sum(resolved.model.layer_neurons - layer.hot_neurons for layer in resolved.layers)
    cold = min(segments.cold, absent * stride)
    if resolved.plan.decode.predictor == "none":
        cold = 0  # everything streams by; nothing is put there
    share = min(1.0, tokens / resolved.plan.kv.context)
    untouched = needs["kv"].bytes * (1.0 - share)
    return ceil(count_runtime(resolved.model) + fixed + cold - untouched)


def count_runtime(model: Model) -> int:
    """Bytes of Python, the libraries, and the tables that the neuron cache keeps."""
    return RUNTIME_BYTES + NEURON_TABLE_BYTES * model.shape.layers * model.layer_neurons
