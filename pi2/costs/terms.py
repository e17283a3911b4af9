"""Seconds of the steps of a layer, each by itself, for planner and simulator."""

from math import expm1

import numpy as np

from pi2.costs.activity import LayerActivity, MergedReads, average_chances
from pi2.costs.hotness import weigh_hot
from pi2.costs.kernel_times import Linear, Rates
from pi2.costs.reads import ALONE
from pi2.costs.settings import Settings, Sizes
from pi2.plan.arithmetic.units import pad_tokens
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import scale_bytes
from pi2.records import dataclass, replace

_UPPER_SPEED = 2.0
"""Speed of products with one activation byte instead of two, from measured projections
(docs/reference/performance.md)."""


_ROUNDED_PART = 1.0 - 3.0 / 16.0
"""Products that rounded steps need: half of gates and ups, which are three eighths of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A step of a unit: its seconds with nothing else going on, and its demand on main memory."""

    seconds: float
    bytes_s: float = 0.0
    """Bytes of main memory in each of these seconds."""

    @property
    def size_bytes(self) -> float:
        return self.seconds * self.bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerms:
    """Steps of a layer, without the ones that depend on missing neurons."""

    settings: Settings
    activity: LayerActivity
    hot: float
    """Share of the neurons that stays in memory."""
    cold: float
    """Share that the cache holds."""
    dense_share: float
    """Share that the dense unit computes."""
    merged: MergedReads
    streamed: float
    """Neurons that are not resident."""
    hot_bytes: int
    attention_s: float
    """Projections and the KV cache, at the settings' position."""
    position_s: float
    """What every further token of context adds."""
    norm_s: float
    """What the FFN begins and ends with, and an MoE model's router."""
    python_s: float
    predict: Work
    look_up_s: float
    """Fixed part of a look-up."""
    place_s: float
    """What a look-up takes more where anything is missing."""
    missing_s: float
    """Additional time of each missing neuron."""
    touch_s: float
    """Additional time of each neuron in the cache."""
    neuron: Work
    """A neuron on the processor, all threads together."""
    call_s: float
    """Fixed part of computing the resident neurons, or a part of the read ones."""
    part_call_s: float
    """The same for a part of the read neurons."""
    wake_s: float
    workers: int
    """Parts that are computed at the same time, each by its share of the threads."""
    launch_s: float
    dense: Work
    """What the dense unit computes, from its start on."""
    shared_bytes_s: float
    """Main memory's rate for all units together."""
    hot_part: float
    """Time of hot neurons relative to gathering them; dense clusters stream by."""

    @property
    def before_s(self) -> float:
        return self.attention_s + self.norm_s + self.python_s

    def time_look_up(self, missing: float, cached: float, chance: float) -> float:
        """Seconds of looking neurons up, some of which are missing with a ``chance``."""
        seconds = self.look_up_s + missing * self.missing_s + chance * self.place_s
        return seconds + self.touch_s * max(cached, 0.0)


def find_terms(
    rates: Rates,
    sizes: Sizes,
    settings: Settings,
    activity: LayerActivity,
    *,
    hot: float,
    cold: float = 0.0,
    dense: float = 0.0,
) -> LayerTerms:
    """Terms of a layer with ``hot`` neurons resident, ``cold`` ones cached and ``dense`` ones on a
    dense unit."""
    speed, batch = rates.scale(settings.threads), settings.batch
    unit = rates.dense
    shared = rates.shared_bytes_s
    predict = _find_predict(rates, sizes, settings)
    attention_s, position_s = _time_attention(rates, sizes, settings)
    gathers = rates.open if settings.predictor == "gate" else rates.gather
    if not rates.measured and (activity.grain > 1 or not settings.is_predicted):
        # Nothing is gathered: an expert's neurons lie together, and whole layers stream by.
        gathers = Linear(call_s=gathers.call_s, bytes_s=rates.bandwidth_bytes_s)
    neuron_bytes = _count_neuron_bytes(rates, sizes, settings, activity)
    neuron_s = neuron_bytes / gathers.bytes_s
    if settings.batch == 1:
        neuron_s = max(neuron_s, sizes.neuron_weights * time_weight(rates, settings))
    neuron_s = _time_neuron(rates, settings, activity, neuron_s)
    looks_up = settings.is_predicted and hot < 1.0
    look_up_s = rates.look_up.call_s if looks_up else 0.0
    if settings.predictor == "gate":
        # Of neurons that were read, the engine knows which they are.
        look_up_s += rates.find_s if hot < 1.0 else rates.find_hot_s
    launch_s, computed = 0.0, Work(seconds=0.0)
    dense_neurons = activity.neurons * activity.chosen * dense
    if dense_neurons > 0 and unit is not None:
        launch_s = unit.launch_s
        size = dense_neurons * (sizes.dense_neuron if unit.is_npu else sizes.bundle.neuron_bytes)
        seconds = size / unit.bytes_s
        if unit.ops_s is not None:
            operations = (
                2.0 * pad_tokens(batch, settings.graphs) * dense_neurons * sizes.neuron_weights
            )
            seconds = max(seconds, operations / unit.ops_s)
        computed = Work(seconds=seconds, bytes_s=0.0 if unit.has_memory else size / seconds)
    merged, reads = ALONE, settings.reads
    if reads is not None and reads.merge_gap is not None:
        merged = activity.merge_reads(hot, cold, reads.merge_gap)
    return LayerTerms(
        settings=settings,
        activity=activity,
        hot=hot,
        cold=cold,
        dense_share=dense,
        merged=merged,
        streamed=activity.neurons * (1.0 - hot),
        hot_bytes=round(hot * activity.neurons) * sizes.bundle.stride,
        attention_s=attention_s,
        position_s=position_s,
        norm_s=time_norm(rates, sizes, settings),
        python_s=rates.python_s,
        predict=predict,
        look_up_s=look_up_s,
        place_s=rates.place_s if looks_up else 0.0,
        missing_s=1.0 / rates.look_up.bytes_s if looks_up else 0.0,
        touch_s=rates.touch_s if looks_up else 0.0,
        neuron=Work(seconds=neuron_s / speed, bytes_s=neuron_bytes / neuron_s * speed),
        call_s=gathers.call_s,
        part_call_s=gathers.call_s if rates.measured else 0.0,
        wake_s=rates.wake_s,
        workers=1 if rates.measured else settings.threads,
        launch_s=launch_s,
        dense=computed,
        shared_bytes_s=shared,
        hot_part=_find_hot_part(rates, settings, activity, hot, dense),
    )


def _find_predict(rates: Rates, sizes: Sizes, settings: Settings) -> Work:
    kernel = rates.gate if settings.predictor == "gate" else rates.predict
    calls = max(sizes.predictors, 1)
    speed = rates.scale(settings.threads)
    seconds = time_matrix(
        kernel, sizes.predictor, sizes.predictor_weights, time_weight(rates, settings), calls=calls
    )
    if seconds <= 0.0:
        return Work(seconds=0.0)
    return Work(seconds=seconds / speed, bytes_s=sizes.predictor / seconds * speed)


def _time_attention(rates: Rates, sizes: Sizes, settings: Settings) -> tuple[float, float]:
    """Seconds of projections and KV cache at the position, and of one more token."""
    speed, batch = rates.scale(settings.threads), settings.batch
    seconds = divide_matrix(
        rates,
        rates.project,
        sizes.projections,
        sizes.projection_weights,
        settings.attention_share,
        speed,
        time_weight(rates, settings),
    )
    token_s, index_s = (
        batch * size / rates.attend.bytes_s / speed for size in (sizes.kv_token, sizes.index_token)
    )
    if settings.position <= sizes.reach:
        return seconds + settings.position * token_s, token_s
    # An index reads its keys of all tokens, and attention the chosen ones.
    return seconds + sizes.reach * token_s + settings.position * index_s, index_s


def divide_matrix(
    rates: Rates,
    kernel: Linear,
    size_bytes: float,
    weights: int,
    share: float,
    speed: float,
    weight_s: float,
) -> float:
    """Seconds of a matrix, ``share`` of whose rows the dense unit computes."""
    whole_s = time_matrix(kernel, size_bytes, weights, weight_s) / speed
    unit = rates.dense
    if share <= 0.0 or unit is None:
        return whole_s
    own_s = kernel.call_s + (whole_s - kernel.call_s) * (1.0 - share)
    other_s = share * size_bytes / unit.bytes_s
    least_s = 0.0 if unit.has_memory else size_bytes / rates.shared_bytes_s
    return max(own_s, other_s, least_s)


def _find_hot_part(
    rates: Rates, settings: Settings, activity: LayerActivity, hot: float, dense: float
) -> float:
    """Devices without pi2's kernels compute hot clusters densely, as PowerInfer-2 does."""
    if rates.measured or rates.whole_unit is not None:
        return 1.0
    if activity.grain > 1 or not settings.is_predicted:
        return 1.0
    chances = average_chances(activity.named)
    share = weigh_hot(hot) - weigh_hot(min(dense, hot))
    active = float((chances * share).sum())
    if active <= 0.0:
        return 1.0
    gathered = np.minimum(chances, rates.constants.gather_efficiency)
    return float((gathered * share).sum()) / active


def find_chance(missing: float) -> float:
    """Chance of any miss from the mean number of independent misses."""
    return -expm1(-missing)


def time_norm(rates: Rates, sizes: Sizes, settings: Settings) -> float:
    """Seconds of norms and router; with look-ahead they run twice."""
    seconds = rates.norm_s + (rates.route_s if sizes.experts else 0.0)
    return seconds if settings.look_ahead == "none" else 2.0 * seconds


def time_matrix(
    kernel: Linear, size_bytes: float, weights: int, weight_s: float, *, calls: int = 1
) -> float:
    """Seconds of a matrix in ``calls`` parts: read once, computed for every sequence."""
    if size_bytes <= 0:
        return 0.0
    return calls * kernel.call_s + max(size_bytes / kernel.bytes_s, weights * weight_s)


def time_weight(rates: Rates, settings: Settings) -> float:
    """Seconds per weight for all sequences; 0 without a rate, or if reading hides it."""
    batch = settings.batch
    if batch == 1 and rates.core_ops_s:
        # `scale` is of reading, by which callers divide.
        return 2.0 * rates.scale(settings.threads) / sum(rates.core_ops_s[: settings.threads])
    if batch == 1 or rates.few_ops_s is None:
        return 0.0
    once_s, token_s = rates.project_many or (0.0, 2.0 / rates.few_ops_s)
    if settings.rounds_steps:
        token_s /= _UPPER_SPEED
    return once_s + batch * token_s


def time_head(rates: Rates, sizes: Sizes, settings: Settings) -> float:
    seconds = divide_matrix(
        rates,
        rates.multiply,
        sizes.head,
        sizes.head_weights,
        settings.head_share,
        rates.scale(settings.threads),
        # The head takes activations as they are, whatever a step rounds.
        time_weight(rates, replace(settings, rounds_steps=False)),
    )
    return seconds + rates.token_s


def time_row(rates: Rates, model: Model) -> float:
    """Seconds to read an embedding row: its weights, and its separate scales."""
    latency_s = rates.constants.read_latency_s if rates.flash is None else rates.flash.latency_s
    scales = scale_bytes(model.shape.stored_hidden, model.quantization.embedding) > 0
    return (1 + scales) * latency_s


def _time_neuron(
    rates: Rates, settings: Settings, activity: LayerActivity, seconds: float
) -> float:
    """Seconds of a neuron for all sequences: the first reads it, others repeat its arithmetic."""
    named_apart = settings.predictor in ("gate", "low-rank") and rates.measured
    if settings.batch == 1 or not named_apart or not activity.products:
        return seconds
    part = rates.constants.product_part * (_ROUNDED_PART if settings.rounds_steps else 1.0)
    others = activity.products / activity.used - 1.0
    return seconds * (1.0 + others * part)


def _count_neuron_bytes(
    rates: Rates, sizes: Sizes, settings: Settings, activity: LayerActivity
) -> float:
    """Mean bytes read of a neuron: up behind open gates, down if it fires."""
    names_all = settings.predictor in ("none", "router")
    if not rates.measured or not sizes.bundle.is_gated or names_all:
        return float(sizes.neuron)
    # Bytes of a down column, of which a gate row has 1.
    down = sizes.bundle.down_bytes / sizes.bundle.gate_bytes
    if settings.predictor == "gate":
        return sizes.neuron * (1.0 + down * activity.fired) / (1.0 + down)
    return sizes.neuron * (1.0 + activity.opened + down * activity.fired) / (2.0 + down)
