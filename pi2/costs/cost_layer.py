"""Time of one layer of a generated token: expected numbers put into `pi2.costs.terms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import comb, expm1

from pi2.costs.terms import LayerKind, Work

_MERGED = 0.95
"""Requests for each missing neuron below which neighbours are taken to share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Seconds of one layer of a token, and the neurons behind them."""

    attention_s: float
    norm_s: float
    predict_s: float
    look_up_s: float
    python_s: float
    compute_s: float
    """The processor's neurons, with nothing else going on."""
    dense_s: float
    """The dense unit's neurons, with nothing else going on."""
    read_s: float
    wait_s: float
    ffn_s: float
    """From the first step of the FFN's neurons until both units are done."""
    used: float
    missing: float
    hot_bytes: int

    @property
    def total_s(self) -> float:
        return self.attention_s + self.norm_s + self.python_s + self.ffn_s

    @property
    def busy_s(self) -> float:
        return max(self.ffn_s - self.predict_s - self.look_up_s - self.wait_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Neurons of a token in a layer."""

    used: float
    """All that a token computes."""
    missing: float
    resident: float
    """What the processor computes of those in memory."""
    cached: float
    """Found in the cache."""
    absent: float
    """Neurons of the computing experts that are not hot, used or not."""
    hot_weight: float
    """What the processor's hot neurons cost, as neurons that are gathered."""


def cost_layer(terms: LayerKind) -> LayerCost:
    """Cost of a layer with expected numbers of neurons."""
    settings, activity = terms.settings, terms.activity
    counts = _count_neurons(terms)
    if activity.grain == 1 or settings.predictor != "router" or counts.missing <= 0.0:
        return cost_counts(terms, counts, -expm1(-counts.missing))  # of independent misses
    # A few experts are missing, or none: times of whole numbers, by how often they come.
    varied = counts.used - activity.always
    number = max(round(varied / activity.grain), 1)
    share = min(counts.missing / max(varied, 1e-9), 1.0)
    costs = []
    for missing in range(number + 1):
        weight = comb(number, missing) * share**missing * (1.0 - share) ** (number - missing)
        part = missing / number * varied
        there = (counts.used - part) / max(counts.used - counts.missing, 1e-9)
        if settings.limits is not None:
            part = settings.limits.limit(float(missing)) / number * varied
        own = replace(
            counts,
            missing=part,
            resident=counts.resident * there,
            cached=counts.cached * there,
            hot_weight=counts.hot_weight * there,
        )
        costs.append((weight, cost_counts(terms, own, float(part > 0.0))))
    return LayerCost(
        **{
            item.name: sum(weight * getattr(found, item.name) for weight, found in costs)
            for item in fields(LayerCost)
            if item.name != "hot_bytes"
        },
        hot_bytes=costs[0][1].hot_bytes,
    )


def cost_counts(terms: LayerKind, counts: Counts, chance: float) -> LayerCost:
    """Times of ``counts``, of which some miss with a ``chance``."""
    settings = terms.settings
    look_up_s = terms.time_look_up(counts.missing, counts.cached, chance)
    gathered_s = (counts.hot_weight + counts.cached) * terms.neuron.seconds
    missing_s = counts.missing * terms.neuron.seconds
    calls_s = terms.gathers.call_s * (counts.resident >= 1.0)
    read_s = wait_s = 0.0
    if settings.stream is not None:
        pieces = settings.stream.count_pieces(terms.streamed)
        calls_s += pieces * terms.gathers.call_s
    elif counts.missing > 0 and settings.reads is not None:
        parts = settings.reads.count_parts(counts.missing / chance)
        calls_s += chance * parts * (terms.gathers.call_s if terms.rates.measured else 0.0)
    elif counts.missing > 0:
        calls_s += 0.0 if counts.resident >= 1.0 else terms.gathers.call_s
    compute_s = gathered_s + missing_s + calls_s
    steps = [
        terms.predict,
        Work(seconds=look_up_s),
        Work(seconds=gathered_s + missing_s, bytes_s=terms.neuron.bytes_s),
        Work(seconds=calls_s),
    ]
    ready_s = run_beside(steps, terms)
    if counts.missing > 0:
        if settings.stream is not None:
            read_s = settings.stream.time_read(terms.streamed)
            before_s = terms.before_s + gathered_s + terms.gathers.call_s
            wait_s = settings.stream.time_wait(pieces, read_s, before_s, missing_s + calls_s)
        elif settings.reads is not None:
            missing = counts.missing / chance
            read_s = chance * settings.reads.time(missing, terms.merged, counts.absent)
            # Threads without pi2's kernels compute a part each, at the same time.
            workers = 1 if terms.rates.measured else settings.threads
            last_s = min(missing_s / parts * workers, missing_s)
            # Look-ahead also hides reads behind attention, or behind the layer before.
            hidden_s = {
                "none": compute_s - last_s,
                "attention": terms.attention_s + compute_s - last_s,
                "layer": terms.before_s + ready_s,
            }[settings.look_ahead]
            wait_s = read_s - settings.reads.overlap * min(read_s, max(hidden_s, 0.0))
            # Threads that have waited for a part have to be woken.
            woken_s = chance * parts * terms.rates.wake_s * wait_s / read_s
            compute_s += woken_s
            steps.append(Work(seconds=woken_s))
    ffn_s = run_beside([*steps, Work(seconds=wait_s)], terms)
    if settings.look_ahead == "layer" and settings.reads is not None:
        # The flash is what the next layer waits for, whichever unit this one has waited for.
        ffn_s = run_beside(steps, terms) + wait_s
    return LayerCost(
        attention_s=terms.attention_s,
        norm_s=terms.norm_s,
        predict_s=terms.predict.seconds,
        look_up_s=look_up_s,
        python_s=terms.rates.python_s,
        compute_s=compute_s,
        dense_s=terms.launch_s + terms.dense_work.seconds if terms.dense_work.seconds else 0.0,
        read_s=read_s,
        wait_s=wait_s,
        ffn_s=ffn_s,
        used=counts.used,
        missing=counts.missing,
        hot_bytes=terms.hot_bytes,
    )


def count_read_bytes(terms: LayerKind, counts: Counts) -> float:
    """Bytes from flash of a layer's token."""
    reads, stream = terms.settings.reads, terms.settings.stream
    if stream is not None:
        return terms.streamed * stream.stride
    if reads is None or counts.missing <= 0.0:
        return 0.0
    together = reads.merge_dense(counts.missing, counts.absent)
    if together is not None and together.requests < _MERGED:
        return counts.missing * reads.stride * (1.0 + together.unwanted)
    return counts.missing * reads.read_bytes * (1.0 + terms.merged.unwanted)


def _count_neurons(terms: LayerKind) -> Counts:
    settings, activity = terms.settings, terms.activity
    hot, cold, dense = terms.hot, terms.cold, terms.dense_share
    possible = activity.neurons * activity.chosen
    absent = possible * (1.0 - hot)
    if settings.predictor == "none":
        # What does not stay is streamed, layer after layer, whatever the cache holds; of a mixture
        # all experts pass by.
        resident = possible * (hot - dense)
        return Counts(
            used=possible,
            missing=absent,
            resident=resident,
            cached=0.0,
            absent=absent,
            hot_weight=resident,
        )
    used = activity.used
    named = min(activity.count_missing(hot, cold, settings.policy), used)
    missing = named
    if settings.leave_out > 0.0:
        missing = activity.count_missing(hot, cold, settings.policy, settings.leave_out)
    within = activity.count_within(hot)
    on_processor = within - activity.count_within(dense) if dense > 0.0 else within
    cached = max(used - named - within, 0.0)
    return Counts(
        used=used - named + missing,
        missing=missing,
        resident=on_processor + cached,
        cached=cached,
        absent=absent,
        hot_weight=on_processor * terms.hot_part,
    )


def run_beside(steps: Sequence[Work], terms: LayerKind) -> float:
    """Seconds of ``steps`` next to the dense unit; both are slower if memory saturates."""
    launch_s, dense = terms.launch_s, terms.dense_work
    if dense.seconds <= 0.0:
        return sum(step.seconds for step in steps)
    now, waits_s, left_s = 0.0, launch_s, dense.seconds
    for step in steps:
        todo_s = step.seconds
        alone_s = min(todo_s, waits_s)
        now, waits_s, todo_s = now + alone_s, waits_s - alone_s, todo_s - alone_s
        slow = max(1.0, (step.bytes_s + dense.bytes_s) / terms.rates.shared_bytes_s)
        if dense.bytes_s == 0.0 or step.bytes_s == 0.0:
            slow = 1.0
        both_s = min(todo_s, left_s)
        now, left_s, todo_s = now + slow * both_s, left_s - both_s, todo_s - both_s
        now += todo_s
    return now + (waits_s + left_s if left_s > 0.0 else 0.0)
