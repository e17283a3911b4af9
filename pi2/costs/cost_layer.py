"""Time of one layer of a generated token, and of prompts: expected numbers put into
`pi2.costs.terms`. Computing one piece of a prompt's layer hides reading the next; devices without
pi2's kernels are taken to read whole layers ahead, as PowerInfer-2 does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import comb, expm1
from typing import TYPE_CHECKING

from pi2.costs.kernel_times import DenseUnit, Rates
from pi2.costs.rates import check_flash
from pi2.costs.settings import Sizes, Stream, find_stream, list_dense_graphs
from pi2.costs.terms import LayerKind, Work
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.units import pad_tokens

if TYPE_CHECKING:
    from pi2.costs.cost import Description

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
            read_s = count_read_bytes(terms, counts) * settings.stream.byte_s
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


_LONG = 512 * 1024
PROMPT = 128
"""Tokens of a prompt whose speed is stated."""


Many = tuple[float, float]
"""Seconds per weight for a pass, and for each token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """A plan's choices about prompts."""

    unit: str
    """Name of the unit that computes them."""
    dense: DenseUnit | None
    """That unit; None for the processor."""
    chunk: int
    together: int
    """Tokens that go through a layer before the next layer begins."""
    reads_all: bool
    """Whether all of a layer is read that does not fit as a whole."""
    stream: Stream | None
    """None where nothing is read."""
    neuron_bytes: int
    """Bytes of a neuron that the unit reads from memory."""
    interleaves: bool
    """Whether neurons in memory are computed between pieces that are read, wherever they lie."""
    graphs: tuple[int, ...]
    """Numbers of tokens, ascending, that the unit takes; none for any."""

    def find_many(self, rates: Rates) -> tuple[Many, Many] | None:
        """Times of neurons and of projections; None without an arithmetic rate."""
        neurons, projections = rates.dense_many, rates.project_many
        if self.dense is not None:
            ops_s = self.dense.ops_s
            neurons = projections = None if ops_s is None else (0.0, 2.0 / ops_s)
        return None if neurons is None or projections is None else (neurons, projections)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayer:
    """A layer's part of a group of chunks."""

    before_s: float
    """Computation that needs no reads."""
    count: int
    """Layers that are alike."""
    streamed_s: float = 0.0
    """Arithmetic of the read pieces, and of the pieces computed in between, all together."""
    pieces: float = 0.0
    read_s: float = 0.0
    """Reading all pieces."""
    read_bytes: float = 0.0


def read_prompt_settings(resolved: ResolvedPlan, rates: Rates, sizes: Sizes) -> PromptSettings:
    plan, model, bundle = resolved.plan, resolved.model, resolved.bundle
    dense = rates.dense
    if dense is not None and plan.prefill.unit != dense.name:
        dense = None
    stream = None
    if any(layer.hot < 1.0 for layer in resolved.layers):
        stream = find_stream(resolved, rates)
        if not rates.measured:
            flash = check_flash(rates, resolved.device)
            stream = Stream(
                byte_s=1.0 / flash.find_rate_bytes_s("sequential", _LONG),
                overlap=rates.stream_overlap if dense is None else rates.beside_overlap,
                neurons=model.layer_neurons,
                stride=bundle.neuron_bytes,
            )
    return PromptSettings(
        unit=resolved.sparse_unit if dense is None else dense.name,
        dense=dense,
        chunk=plan.prefill.chunk,
        together=plan.prefill.chunk * resolved.chunks,
        reads_all=not rates.measured and plan.pipeline.prefill == "layers-first",
        stream=stream,
        neuron_bytes=sizes.dense_neuron if dense and dense.is_npu else bundle.neuron_bytes,
        interleaves=rates.measured and model.moe is not None and plan.decode.predictor == "router",
        graphs=() if dense is None else list_dense_graphs(resolved, rates),
    )


def list_prompt_layers(description: Description, tokens: int) -> list[PromptLayer] | None:
    """Layers of a prompt of ``tokens`` in order; None without an arithmetic rate."""
    prompts = description.prompts
    many = prompts.find_many(description.rates)
    if many is None:
        return None
    found = []
    for start in range(0, tokens, prompts.together):
        taken = min(prompts.together, tokens - start)
        chunks = [min(prompts.chunk, taken - first) for first in range(0, taken, prompts.chunk)]
        found += [_describe_layer(description, kind, chunks, *many) for kind in description.kinds]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCost:
    """Time of a prompt."""

    tokens: int
    tokens_s: float
    read_bytes: float

    @property
    def duration_s(self) -> float:
        return self.tokens / self.tokens_s


def cost_prompt(description: Description, tokens: int = PROMPT) -> PromptCost | None:
    """Cost of a prompt; None without an arithmetic rate."""
    layers = list_prompt_layers(description, tokens)
    if layers is None:
        return None
    stream = description.prompts.stream
    seconds = description.head_s + tokens * description.embedding_s
    seconds += sum(_time_layer(layer, stream, layer.before_s) * layer.count for layer in layers)
    first = next((layer for layer in layers if layer.pieces), None)
    if first is not None:
        # Nothing has been read before the first piece is asked for.
        seconds += _time_layer(first, stream, first.before_s - first.streamed_s / first.pieces)
        seconds -= _time_layer(first, stream, first.before_s)
    size = sum(layer.count * layer.read_bytes for layer in layers)
    return PromptCost(tokens=tokens, tokens_s=tokens / seconds, read_bytes=size)


def _time_layer(layer: PromptLayer, stream: Stream | None, ready_s: float) -> float:
    """Seconds of a layer whose first piece is read during ``ready_s`` and its own arithmetic."""
    seconds = layer.before_s + layer.streamed_s
    if stream is None:
        return seconds
    return seconds + stream.time_wait(layer.pieces, layer.read_s, ready_s, layer.streamed_s)


def _describe_layer(
    description: Description, kind: LayerKind, chunks: list[int], ffn: Many, project: Many
) -> PromptLayer:
    prompts, rates, sizes = description.prompts, kind.rates, kind.sizes
    activity, stream, dense = kind.activity, prompts.stream, prompts.dense
    tokens = sum(chunks)
    padded = [pad_tokens(count, prompts.graphs) for count in chunks]
    # Whole layers are read ahead before a router has chosen.
    touched = 1.0 if prompts.reads_all else kind.count_touched(tokens) / activity.neurons
    absent = activity.neurons - round(kind.hot * activity.neurons)
    if prompts.reads_all:
        absent = 0 if kind.hot + kind.cold >= 1.0 - 1e-3 else activity.neurons
    reading = stream is not None and absent > 0
    slow = 1.0
    if reading and dense is not None and not rates.measured:
        slow = 1.0 / rates.constants.streaming_compute_share
    fixed_s = rates.norm_s + rates.python_s + rates.route_s * (sizes.experts > 0)
    fixed_s = len(chunks) * (fixed_s + (0.0 if dense is None else dense.launch_s))
    project_s = sum(_time_many(project, sizes.projection_weights, count) for count in padded)
    share = 1.0
    skips = rates.measured and dense is None and not description.is_smooth
    if skips and activity.grain == 1:
        # Closed gates skip ups, and zero activations downs. Gates, and ups of neurons without a
        # gate, are computed for all tokens.
        parts = sizes.neuron_weights // sizes.hidden
        rest = activity.opened * (parts - 2) + activity.fired
        share = (1.0 + activity.named.active * rest) / parts
    ffn_s = sum(
        _time_many(
            ffn,
            sizes.neuron_weights,
            count * kind.count_touched(1) * share,
            kind.count_touched(count),
        )
        for count in padded
    )
    if not rates.measured:
        # A pass reads its weights once from memory, whatever it computes with them.
        touched_bytes = prompts.neuron_bytes * sum(map(kind.count_touched, chunks))
        bytes_s = rates.bandwidth_bytes_s if dense is None else dense.bytes_s
        least_s = (len(chunks) * sizes.projections + touched_bytes) / bytes_s
        scale = max(1.0, least_s / ((project_s + ffn_s) * slow))
        project_s, ffn_s = project_s * scale, ffn_s * scale
    part = absent / activity.neurons
    streamed = 1.0 if reading and prompts.interleaves else part
    before_s = fixed_s + slow * (project_s + ffn_s * (1.0 - streamed))
    if not reading:
        return PromptLayer(before_s=before_s, count=kind.count)
    assert stream is not None
    size = absent * (1.0 if rates.measured else touched) * stream.stride
    return PromptLayer(
        before_s=before_s,
        streamed_s=slow * ffn_s * streamed,
        pieces=stream.count_pieces(absent),
        read_s=size * stream.byte_s,
        read_bytes=size,
        count=kind.count,
    )


def _time_many(rate: Many, weights: float, products: float, passes: float = 1.0) -> float:
    """Seconds of ``passes`` over ``weights``, and of the ``products`` with a token."""
    once_s, token_s = rate
    return weights * (once_s * passes + token_s * products)
