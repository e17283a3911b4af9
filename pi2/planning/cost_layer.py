"""Time of one layer of a generated token: the terms that docs/lab/cost-model.md explains."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import scale_bytes
from pi2.planning.activity import LayerActivity, Policy, PredictorMode
from pi2.planning.cost_memory import POSITION
from pi2.planning.cost_sizes import Sizes
from pi2.planning.cost_stream import Stream
from pi2.planning.kernel_times import Linear
from pi2.planning.rates import Rates
from pi2.planning.storage_choice import ALONE, Reads
from pi2.simulate.constants import Constants

LookAhead = Literal["none", "attention", "layer"]


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
    stream: Stream | None = None
    """How layers stream by, where every neuron is computed."""
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
    python_s: float
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
        shared = self.attention_s + self.norm_s + self.predict_s + self.look_up_s + self.python_s
        return shared + max(self.compute_s, self.dense_s) + self.wait_s


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
    own = rates.dense is not None and rates.dense.has_memory
    shared = rates.shared_bytes_s / rates.project.bytes_s if dense > 0 and not own else 1.0
    attention = time_matrix(
        rates, rates.project, sizes.projections, sizes.projection_weights, batch
    ) / max(shared, 1.0)
    attention += batch * settings.position * sizes.kv_token / rates.attend.bytes_s
    gates = settings.predictor == "gate"
    gather = rates.open if gates else rates.gather
    predict = time_matrix(
        rates,
        rates.gate if gates else rates.predict,
        sizes.predictor,
        sizes.predictor_weights,
        batch,
        calls=max(sizes.predictors, 1),
    )
    norm_s = time_norm(rates, sizes, settings)
    if settings.predictor == "none":
        used = float(activity.neurons) * activity.chosen
        # What does not stay is streamed, layer after layer, whatever the cache holds; of a mixture
        # all experts pass by.
        missing = used * (1.0 - hot)
        look_up = 0.0
    else:
        used = activity.used
        missing = min(activity.count_missing(hot, cold, settings.policy), used)
        # Of a layer that is all hot, nothing is looked up.
        look_up = 0.0
        if hot < 1.0:
            look_up = rates.look_up.call_s + missing / rates.look_up.bytes_s
            look_up += rates.place_s * find_chance(missing)
            cached = used - missing - activity.count_within(hot)
            look_up += rates.touch_s * max(cached, 0.0)
    dense_neurons = activity.neurons * activity.chosen * dense
    computed = max(used - activity.count_within(dense), 0.0) if dense > 0 else used
    dense_s = 0.0
    slow = 1.0
    if dense_neurons > 0 and rates.dense is not None:
        together = rates.dense.bytes_s + gather.bytes_s
        slow = 1.0 if own else max(1.0, together / rates.shared_bytes_s)
        dense_s = rates.dense.launch_s
        seconds = dense_neurons * sizes.dense_neuron / rates.dense.bytes_s * slow
        if rates.dense.ops_s is not None:
            operations = 2.0 * batch * dense_neurons * sizes.neuron_weights
            seconds = max(seconds, operations / rates.dense.ops_s)
        dense_s += seconds
    resident = max(computed - missing, 0.0)
    per_neuron = _count_neuron_bytes(rates, sizes, settings, activity) / gather.bytes_s
    per_neuron *= slow / speed
    reads, stream = settings.reads, settings.stream
    chance = find_chance(missing)
    parts = 1.0 if reads is None else reads.count_parts(missing / chance if chance else 0.0)
    calls = (resident >= 1.0) + (parts * chance if missing > 0 else 0.0)
    if stream is not None:
        calls = (resident >= 1.0) + stream.count_pieces(activity.neurons * (1.0 - hot))
    if gates:
        # Of neurons that were read, the engine knows which they are.
        look_up += rates.find_s if hot < 1.0 else rates.find_hot_s
    compute = (resident + missing) * per_neuron + calls * gather.call_s
    attention_s = attention / speed
    busy = max(compute, dense_s)
    read = wait = 0.0
    if stream is not None and missing > 0:
        absent = activity.neurons * (1.0 - hot)
        read = stream.time_read(absent)
        streamed = missing * per_neuron + calls * gather.call_s
        before = attention_s + norm_s + rates.python_s + resident * per_neuron
        wait = stream.time_wait(absent, before, streamed)
    elif reads is not None and missing > 0:
        merged = ALONE
        if reads.merge_gap is not None:
            merged = activity.merge_reads(hot, cold, reads.merge_gap)
        read = chance * reads.time(missing / chance, merged)
        last_s = missing * per_neuron / slow / parts  # when the dense unit has done its part
        hidden = _find_hidden(settings, attention_s, norm_s + predict / speed, busy, last_s)
        wait = read - reads.overlap * min(read, max(hidden, 0.0))
        # Threads that have waited for a part have to be woken.
        compute += chance * parts * rates.wake_s * wait / read
    return LayerCost(
        attention_s=attention_s,
        norm_s=norm_s,
        predict_s=predict / speed,
        look_up_s=look_up,
        python_s=rates.python_s,
        compute_s=compute,
        dense_s=dense_s,
        read_s=read,
        wait_s=wait,
        used=used,
        missing=missing,
        hot_bytes=round(hot * activity.neurons) * sizes.stride,
    )


def find_chance(missing: float) -> float:
    """Chance that a layer that misses so many neurons on average misses any of them for a token:
    misses are taken to be independent."""
    return 1.0 - exp(-missing)


def time_norm(rates: Rates, sizes: Sizes, settings: Settings) -> float:
    """Seconds of what the FFN begins and ends with: norms, and a mixture's router.  Looking ahead,
    once for what a layer is guessed from, and once for the layer."""
    seconds = rates.norm_s + (rates.route_s if sizes.experts else 0.0)
    return seconds if settings.look_ahead == "none" else 2.0 * seconds


def time_matrix(
    rates: Rates,
    kernel: Linear,
    size_bytes: float,
    weights: int,
    batch: int,
    *,
    calls: int = 1,
) -> float:
    """A matrix for a batch, in ``calls`` parts: read once, but computed for every sequence."""
    if size_bytes <= 0:
        return 0.0
    call_s = calls * kernel.call_s
    seconds = call_s + size_bytes / kernel.bytes_s
    if batch > 1 and rates.few_ops_s is not None:
        seconds = max(seconds, call_s + 2.0 * batch * weights / rates.few_ops_s)
    return seconds


def time_head(rates: Rates, sizes: Sizes, batch: int) -> float:
    """Seconds of the output head of a step."""
    return time_matrix(rates, rates.multiply, sizes.head, sizes.head_weights, batch)


def time_row(rates: Rates, model: Model) -> float:
    """Seconds of reading a token's row of the embedding: its weights, then its scales, which lie
    apart in the store."""
    latency_s = Constants().read_latency_s if rates.flash is None else rates.flash.latency_s
    scales = scale_bytes(model.shape.stored_hidden, model.quantization.embedding) > 0
    return (1 + scales) * latency_s


def _count_neuron_bytes(
    rates: Rates, sizes: Sizes, settings: Settings, activity: LayerActivity
) -> float:
    """Bytes of a neuron that are read on average: up only behind an open gate, down only if the
    neuron fires.  Unmeasured devices have a rate for whole neurons."""
    names_all = settings.predictor in ("none", "router")
    if not rates.measured or not sizes.is_gated or names_all:
        return float(sizes.neuron)
    if settings.predictor == "gate":
        return sizes.neuron * (1.0 + activity.fired) / 2
    return sizes.neuron * (1.0 + activity.opened + activity.fired) / 3


def _find_hidden(
    settings: Settings, attention_s: float, predict_s: float, compute_s: float, last_s: float
) -> float:
    """Seconds of reading during which the processor has something to do.

    The last part of what is read is computed, in ``last_s``, when reading is over.  Looking ahead,
    attention goes on meanwhile, or everything of a layer does, finding the next one's neurons, too.
    """
    match settings.look_ahead:
        case "none":
            return compute_s - last_s
        case "attention":
            return attention_s + compute_s - last_s
        case "layer":
            return attention_s + predict_s + compute_s
