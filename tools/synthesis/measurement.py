"""Statistics of a store as it lies on the disk, by the reference mathematics, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layerwise import LayerExecutor, NeuronPiece, Weights
from measure_conversion import StoreWeights
from pi2.arrays import F32, F64, I32, I64, Bits
from pi2.backends.reference.executor import NeuronSums
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.store.reader import NeuronStore
from synthesis.statistics import LayerStatistics, Overlap, compute_overlap, compute_skew


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
    executor: _Watcher | None = None
    layers: list[LayerStatistics] = []
    measured = min(most_layers or model.shape.layers, model.shape.layers)
    counts = np.zeros((model.shape.layers, model.layer_neurons), np.int64)
    active_neurons = np.zeros(tokens, np.int64)
    for layer in range(measured):
        # Opened anew for every layer: what is mapped of the others would count as our memory.
        with NeuronStore.open(path, model=model) as store:
            weights = StoreWeights(store)
            if executor is None:
                executor = _Watcher(weights, model, tokens, 1)
                executor.begin([ids])
            executor.weights = weights
            executor.fill(layer)
            executor.begin_layer(layer, 0)
            for piece in weights.list_neurons(layer):
                executor.add_piece(piece, 0)
            active, gates = executor.take()
            original = store.layers[layer].original
            experts = original // model.shape.ffn
            predicted = None
            if model.predictor is not None:
                predicted = executor.predict_all(layer, experts) >= threshold
            loads = None
            if model.moe is not None:
                routed = executor.read_routes() > 0
                loads = routed.mean(axis=0)
                if predicted is not None:
                    predicted &= routed[:, experts]
            executor.end_layer(layer, 0)
            executor.forget()
            counts[layer, original] = active.sum(axis=0)
        active_neurons += active.sum(axis=1)
        layers.append(_summarise(active, gates, predicted, model.blocks[layer].ffn.neurons, loads))
        progress("measuring", (layer + 1) / measured)
    shares = active_neurons / sum(block.ffn.neurons for block in model.blocks[:measured])
    return Measurement(
        tokens=tokens, layers=tuple(layers), token_shares=shares.astype(np.float32), counts=counts
    )


class _Watcher(LayerExecutor):
    """Notes which neurons of a layer are active, and whose gates are above the threshold."""

    def __init__(self, weights: Weights, model: Model, context: int, windows: int) -> None:
        super().__init__(weights, model, context, windows)
        self._seen: list[tuple[Bits, Bits]] = []

    def activate(self, piece: NeuronPiece, values: Sequence[F32], now: NeuronSums) -> F32:
        model, active = self._model, super().activate(piece, values, now)
        fires = values[0] > (model.ffn.threshold if model.ffn.activation == "fatrelu" else 0.0)
        if piece.experts is not None:
            fires &= now.routes[:, piece.experts] > 0
        # Every value of SiLU counts: what is negative contributes little, but not nothing.
        self._seen.append((fires if model.is_smooth else active != 0, fires))
        return active

    def take(self) -> tuple[Bits, Bits]:
        """What has been noted, [tokens, neurons] each, in stored order."""
        active, gates = (np.concatenate(own, axis=1) for own in zip(*self._seen, strict=True))
        self._seen.clear()
        return active, gates

    def read_routes(self) -> F32:
        """Weights of a mixture's experts [tokens, experts]."""
        return self._executor.read_routes()

    def predict_all(self, layer: int, experts: I32) -> F32:
        """Predictor scores [tokens, neurons]; ``experts`` [neurons] of the neurons."""
        return self._executor.score_all(layer, experts)


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
