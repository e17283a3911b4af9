"""Prompts through the layers: computing one piece hides reading the next; devices without pi2's
kernels are taken to read whole layers ahead, as PowerInfer-2 does."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from pi2.costs.kernel_times import DenseUnit, Rates
from pi2.costs.rates import check_flash
from pi2.costs.settings import Sizes, Stream, find_stream, list_dense_graphs
from pi2.costs.terms import LayerKind
from pi2.fitting.sizes import count_chunks
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.units import pad_tokens

if TYPE_CHECKING:
    from pi2.costs.cost import Description

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
    pieces: int = 0
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
        together=plan.prefill.chunk * count_chunks(resolved),
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
        pieces=ceil(absent / stream.neurons - 1e-9),
        read_s=size * stream.byte_s,
        read_bytes=size,
        count=kind.count,
    )


def _time_many(rate: Many, weights: float, products: float, passes: float = 1.0) -> float:
    """Seconds of ``passes`` over ``weights``, and of the ``products`` with a token."""
    once_s, token_s = rate
    return weights * (once_s * passes + token_s * products)
