"""Seconds of the steps of a layer, each by itself, for planner and simulator."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pi2.costs.activity import LayerActivity, MergedReads, average_chances
from pi2.costs.hotness import weigh_hot
from pi2.costs.kernel_times import Linear, Rates
from pi2.costs.reads import ALONE
from pi2.costs.settings import Settings, Sizes
from pi2.plan.arithmetic.units import pad_tokens
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import scale_bytes

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


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are alike, and their steps without the ones that depend on missing neurons."""

    rates: Rates
    settings: Settings
    activity: LayerActivity
    hot: float
    """Share of the neurons that stays in memory."""
    cold: float
    """Share that the cache holds."""
    dense: float
    """Share that the dense unit has; it computes resident ones."""
    routing: LayerActivity | None = None
    """How a router chooses experts, whose neurons are named or not; None without experts."""
    layers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def sizes(self) -> Sizes:
        return self.settings.sizes

    @property
    def is_whole(self) -> bool:
        """Whether tokens compute all of their neurons."""
        return not self.settings.is_predicted

    @property
    def dense_share(self) -> float:
        return min(self.dense, self.hot)

    def count_touched(self, tokens: int) -> float:
        """Neurons of the experts that any of ``tokens`` needs."""
        neurons = self.activity.neurons
        return float(neurons) if self.routing is None else self.routing.count_united(tokens)

    @property
    def streamed(self) -> float:
        """Neurons that are not resident."""
        return self.activity.neurons * (1.0 - self.hot)

    @property
    def hot_bytes(self) -> int:
        return round(self.hot * self.activity.neurons) * self.sizes.bundle.stride

    @cached_property
    def speed(self) -> float:
        """Part of the processor's rates that its threads have."""
        return self.rates.scale(self.settings.threads)

    @cached_property
    def norm_s(self) -> float:
        """What the FFN begins and ends with, and an MoE model's router."""
        rates = self.rates
        seconds = rates.norm_s + (rates.route_s if self.sizes.experts else 0.0)
        # With look-ahead they run twice.
        return seconds if self.settings.look_ahead == "none" else 2.0 * seconds

    @property
    def before_s(self) -> float:
        return self.attention_s + self.norm_s + self.rates.python_s

    @cached_property
    def merged(self) -> MergedReads:
        """What neighbours make of missing neurons' reads."""
        reads = self.settings.reads
        if reads is None or reads.merge_gap is None:
            return ALONE
        return self.activity.merge_reads(self.hot, self.cold, reads.merge_gap)

    @property
    def position_s(self) -> float:
        """What every further token of context adds."""
        sizes, settings = self.sizes, self.settings
        # Beyond its reach an index reads its keys of all tokens, and attention the chosen ones.
        size = sizes.kv_token if settings.position <= sizes.reach else sizes.index_token
        return self._time_keys(size)

    @cached_property
    def attention_s(self) -> float:
        """Projections and the KV cache, at the settings' position."""
        sizes, settings = self.sizes, self.settings
        seconds = divide_matrix(
            self.rates,
            self.rates.steps["project"],
            sizes.projections,
            sizes.projection_weights,
            settings.attention_share,
            self.speed,
            time_weight(self.rates, settings),
        )
        seconds += min(settings.position, sizes.reach) * self._time_keys(sizes.kv_token)
        if settings.position > sizes.reach:
            seconds += settings.position * self._time_keys(sizes.index_token)
        return seconds

    def _time_keys(self, size_bytes: float) -> float:
        return self.settings.batch * size_bytes / self.rates.steps["attend"].bytes_s / self.speed

    @cached_property
    def predict(self) -> Work:
        rates, sizes = self.rates, self.sizes
        kernel = rates.steps["gate" if self.settings.predictor == "gate" else "predict"]
        calls, weight_s = max(sizes.predictors, 1), time_weight(rates, self.settings)
        seconds = time_matrix(
            kernel, sizes.predictor, sizes.predictor_weights, weight_s, calls=calls
        )
        if seconds <= 0.0:
            return Work(seconds=0.0)
        return Work(seconds=seconds / self.speed, bytes_s=sizes.predictor / seconds * self.speed)

    @cached_property
    def gathers(self) -> Linear:
        """Computing resident neurons, or a part of the read ones."""
        rates = self.rates
        found = rates.steps["open" if self.settings.predictor == "gate" else "gather"]
        if not rates.measured and (self.activity.grain > 1 or not self.settings.is_predicted):
            # Nothing is gathered: an expert's neurons lie together, and whole layers stream by.
            return Linear(call_s=found.call_s, bytes_s=rates.bandwidth_bytes_s)
        return found

    @cached_property
    def neuron(self) -> Work:
        """A neuron on the processor, all threads together."""
        rates, settings, activity = self.rates, self.settings, self.activity
        size = self._count_neuron_bytes()
        seconds = size / self.gathers.bytes_s
        if settings.batch == 1:
            seconds = max(seconds, self.sizes.neuron_weights * time_weight(rates, settings))
        elif settings.predictor in ("gate", "low-rank") and rates.measured and activity.products:
            # The first sequence reads it, others repeat its arithmetic.
            part = rates.constants.product_part * (_ROUNDED_PART if settings.rounds_steps else 1.0)
            seconds *= 1.0 + (activity.products / activity.used - 1.0) * part
        return Work(seconds=seconds / self.speed, bytes_s=size / seconds * self.speed)

    def _count_neuron_bytes(self) -> float:
        """Mean bytes read of a neuron: up behind open gates, down if it fires."""
        sizes, activity, predictor = self.sizes, self.activity, self.settings.predictor
        names_all = predictor in ("none", "router")
        if not self.rates.measured or not sizes.bundle.is_gated or names_all:
            return float(sizes.neuron)
        # Bytes of a down column, of which a gate row has 1.
        down = sizes.bundle.down_bytes / sizes.bundle.gate_bytes
        if predictor == "gate":
            return sizes.neuron * (1.0 + down * activity.fired) / (1.0 + down)
        return sizes.neuron * (1.0 + activity.opened + down * activity.fired) / (2.0 + down)

    @cached_property
    def dense_work(self) -> Work:
        """What the dense unit computes, from its start on."""
        unit, sizes, settings = self.rates.dense, self.sizes, self.settings
        neurons = self.activity.neurons * self.activity.chosen * self.dense_share
        if neurons <= 0 or unit is None:
            return Work(seconds=0.0)
        size = neurons * (sizes.dense_neuron if unit.is_npu else sizes.bundle.neuron_bytes)
        seconds = size / unit.bytes_s
        if unit.ops_s is not None:
            tokens = pad_tokens(settings.batch, settings.graphs)
            seconds = max(seconds, 2.0 * tokens * neurons * sizes.neuron_weights / unit.ops_s)
        return Work(seconds=seconds, bytes_s=0.0 if unit.has_memory else size / seconds)

    @property
    def launch_s(self) -> float:
        unit = self.rates.dense
        return unit.launch_s if unit is not None and self.dense_work.seconds > 0.0 else 0.0

    @cached_property
    def hot_part(self) -> float:
        """Time of hot neurons relative to gathering them. Devices without pi2's kernels compute hot
        clusters densely, as PowerInfer-2 does."""
        rates, activity = self.rates, self.activity
        if rates.measured or rates.whole_unit is not None:
            return 1.0
        if activity.grain > 1 or not self.settings.is_predicted:
            return 1.0
        chances = average_chances(activity.named)
        share = weigh_hot(self.hot) - weigh_hot(min(self.dense_share, self.hot))
        active = float((chances * share).sum())
        if active <= 0.0:
            return 1.0
        gathered = np.minimum(chances, rates.constants.gather_efficiency)
        return float((gathered * share).sum()) / active

    def time_look_up(self, missing: float, cached: float, chance: float) -> float:
        """Seconds of looking neurons up, some of which are missing with a ``chance``."""
        rates, is_whole = self.rates, self.hot >= 1.0
        seconds = 0.0
        if self.settings.is_predicted and not is_whole:
            seconds += rates.look_up.call_s + missing / rates.look_up.bytes_s
            seconds += chance * rates.place_s + rates.touch_s * max(cached, 0.0)
        if self.settings.predictor == "gate":
            # Of neurons that were read, the engine knows which they are.
            seconds += rates.find_hot_s if is_whole else rates.find_s
        return seconds


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


def time_head(rates: Rates, settings: Settings) -> float:
    seconds = divide_matrix(
        rates,
        rates.steps["multiply"],
        settings.sizes.head,
        settings.sizes.head_weights,
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
