"""Statistics of a store as it lies on the disk, by the reference mathematics, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F32, F64, I32, I64, U8, Bits
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.executor import ReferenceExecutor
from pi2.backends.reference.operators import activate, multiply_down
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import join_scales, slice_experts, unpack_part
from pi2.plan.weights.layout import BundleLayout
from pi2.progress import Progress, ignore_progress
from pi2.store.reader import NeuronStore, StoredLayer
from synthesis.statistics import LayerStatistics, Overlap, compute_overlap, compute_skew

_CHUNK_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a sample of tokens does to every layer."""

    tokens: int
    layers: tuple[LayerStatistics, ...]
    token_shares: F32
    """Share of active neurons of every token, over all layers, [tokens]."""
    counts: I64
    """Activations by original neuron, [layers, neurons]; 0 in layers that were not measured."""


def choose_tokens(model: Model, count: int) -> I32:
    """``count`` tokens, one after the other through the vocabulary, end tokens left out."""
    ends = set(model.tokenizer.eos)
    vocab = model.shape.vocab
    usable = np.array([token for token in range(vocab) if token not in ends], np.int32)
    first = min(1000, len(usable) // 4)
    return np.resize(np.roll(usable, -first), count)


def measure_store(
    path: Path,
    model: Model,
    *,
    tokens: int,
    threshold: float = 0.0,
    most_layers: int | None = None,
    progress: Progress = ignore_progress,
) -> Measurement:
    """Run ``tokens`` tokens through the store at ``path`` as one sequence, densely.

    ``threshold`` is the predictor score from which a neuron counts as predicted; ``most_layers``:
    measure no more than the first of so many.  Holds one layer at a time, in pieces.
    """
    ids = choose_tokens(model, tokens)
    stream: F32 | None = None
    layers: list[LayerStatistics] = []
    measured = min(most_layers or model.shape.layers, model.shape.layers)
    counts = np.zeros((model.shape.layers, model.layer_neurons), np.int64)
    active_neurons = np.zeros(tokens, np.int64)
    for layer in range(measured):
        # Opened anew for every layer: what is mapped of the others would count as our memory.
        with NeuronStore.open(path, model=model) as store:
            executor = _LayerExecutor(_describe_request(store, model, tokens))
            if stream is None:
                executor.embed(ids)
            else:
                executor.stream = stream
            executor.attend(layer, 0)
            executor.begin_ffn(layer)
            active, gates = _run_neurons(executor, store.layers[layer], store.bundle, model)
            executor.end_ffn(layer)
            stream = executor.stream
            original = store.layers[layer].original
            experts = original // model.shape.ffn
            predicted = None
            if model.predictor is not None:
                predicted = executor.predict_all(layer, experts) >= threshold
            loads = None
            if model.moe is not None:
                routed = executor.routes > 0
                loads = routed.mean(axis=0)
                if predicted is not None:
                    predicted &= routed[:, experts]
            counts[layer, original] = active.sum(axis=0)
        active_neurons += active.sum(axis=1)
        layers.append(_summarise(active, gates, predicted, model.blocks[layer].ffn.neurons, loads))
        progress("measuring", (layer + 1) / measured)
    shares = active_neurons / sum(block.ffn.neurons for block in model.blocks[:measured])
    return Measurement(
        tokens=tokens, layers=tuple(layers), token_shares=shares.astype(np.float32), counts=counts
    )


class _LayerExecutor(ReferenceExecutor):
    """The reference executor, with access to what lies between its steps."""

    @property
    def stream(self) -> F32:
        """x [tokens, hidden]."""
        return self._now.x

    @stream.setter
    def stream(self, value: F32) -> None:
        self._now.x = value

    @property
    def ffn_input(self) -> F32:
        """u [tokens, hidden]."""
        return self._now.u

    def add_output(self, active: F32, output: F32) -> None:
        """Add [tokens, hidden] to the sum of the FFN, of neurons whose activations are ``active``
        [tokens, n]."""
        self._now.squares += np.square(active).sum(axis=1)
        self._now.y = self._now.y + output

    @property
    def routes(self) -> F32:
        """Weights of a mixture's experts [tokens, experts]."""
        return self._now.routes

    def predict_all(self, layer: int, experts: I32) -> F32:
        """Predictor scores [tokens, neurons]; ``experts`` [neurons] of the neurons."""
        scores = np.empty((len(self._now.u), len(experts)), np.float32)
        for expert in range(self._model.expert_count):
            scores[:, experts == expert] = self._prediction.score(layer, expert, self._now.u)
        return scores


def _run_neurons(
    executor: _LayerExecutor, layer: StoredLayer, layout: BundleLayout, model: Model
) -> tuple[Bits, Bits]:
    """Compute all neurons; returns which were active, and whose gates were above the threshold,
    [tokens, ffn] each, in stored order."""
    inputs = executor.ffn_input
    active = np.empty((len(inputs), layer.neurons), bool)
    gates = np.empty_like(active)
    threshold = model.ffn.threshold if model.ffn.activation == "fatrelu" else 0.0
    stored, layout = layout, layout.inline
    for first, bundles in _read_bundles(layer, stored):
        inner = [unpack_part(bundles, layout, i) for i in range(len(layout.parts) - 1)]
        gate_values = inputs @ inner[0].T
        values = activate(model, gate_values, inputs @ inner[1].T if layout.is_gated else None)
        fires = gate_values > threshold
        if layout.expert_offset is not None:
            routes = executor.routes[:, slice_experts(bundles, layout)]
            values *= routes
            fires &= routes > 0
        executor.add_output(values, multiply_down(layout, values, bundles))
        place = slice(first, first + len(bundles))
        gates[:, place] = fires
        # Every value of SiLU counts: what is negative contributes little, but not nothing.
        active[:, place] = gates[:, place] if model.is_smooth else values != 0
    return active, gates


def _read_bundles(layer: StoredLayer, layout: BundleLayout) -> Iterator[tuple[int, U8]]:
    """First neuron and bundles of every piece, with their scales in them, read into memory that is
    given back."""
    size = max(1, _CHUNK_WEIGHTS // layout.hidden)
    with layer.path.open("rb") as file:
        file.seek(layer.bundles_offset)
        for first in range(0, layer.neurons, size):
            count = min(size, layer.neurons - first)
            piece = np.frombuffer(file.read(count * layout.stride), np.uint8)
            piece, scales = piece.reshape(count, layout.stride), layer.scales
            if scales is not None:
                piece = join_scales(piece, scales, layout, slice(first, first + count))
            yield first, piece


def _summarise(
    active: Bits, gates: Bits, predicted: Bits | None, possible: int, loads: F64 | None
) -> LayerStatistics:
    """``possible``: neurons that may compute a token; ``loads`` [experts]: share of the tokens that
    each expert computes."""
    shares = active.sum(axis=1) / possible
    counts = active.sum(axis=0)
    found = recall = None
    if predicted is not None:
        found = float(predicted.sum(axis=1).mean() / possible)
        recall = float((active & predicted).sum() / max(1, active.sum()))
    overlap: Overlap = compute_overlap(active)
    neurons = active.shape[1]
    return LayerStatistics(
        active=float(shares.mean()),
        active_deviation=float(shares.std()),
        gate_positive=float(gates.sum(axis=1).mean() / possible),
        skew=compute_skew(counts),
        first_half=float(counts[: neurons // 2].sum() / max(1, counts.sum())),
        predicted=found,
        recall=recall,
        overlap=overlap.successive,
        overlap_by_chance=overlap.chance,
        least_load=None if loads is None else float(loads.min()),
        most_load=None if loads is None else float(loads.max()),
    )


def _describe_request(store: NeuronStore, model: Model, tokens: int) -> BuildRequest:
    def allocate(segment: str, size: int) -> U8:
        return np.zeros(size, np.uint8)

    return BuildRequest(
        model=model,
        tensors=store.tensors,
        bundle=store.bundle.inline,
        neurons=model.layer_neurons,
        chunk=tokens,
        context=tokens,
        gate_rows=None,
        threads=1,
        features=frozenset(),
        architecture="",
        allocate=allocate,
        progress=ignore_progress,
    )
