"""What low-rank predictors say of a whole chunk of tokens, and how right they are."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.backends.arithmetic import slice_tensor
from pi2.backends.protocol import BuildRequest
from pi2.caches import check_regular
from pi2.diagnostics import UserError
from pi2.engine.parts import Routing
from pi2.formats import find_packing
from pi2.importing.conversion_job import read_counts
from pi2.measuring.activations import ACTIVATIONS, Statistics
from pi2.model.tensor import name_layer_tensor
from pi2.plan.weights.layout import Tensor
from pi2.tracing import add_legend, make_figure, pick_colours, pick_styles, save_figure


def draw_activations(folder: Path, statistics: Statistics, file_format: str) -> bytes:
    """Draw hotness curves and skew of all layers; UserError P632, P633, P540."""
    layers = len(statistics.layers)
    rows = count_rows(folder / ACTIVATIONS)
    counts = read_counts(folder / ACTIVATIONS, layers, rows // layers)
    figure = make_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    colours = pick_colours(layers)
    for layer, fired in enumerate(counts):
        chances = np.sort(fired)[::-1] / statistics.tokens
        shares = np.arange(1, len(chances) + 1) / len(chances)
        label = str(layer) if layer in (0, layers - 1) else None
        left.plot(shares * 100, chances * 100, color=colours[layer], linewidth=0.8, label=label)
    left.set_xlabel("% of the layer's neurons, hottest first")
    left.set_ylabel("% of tokens that activate them")
    add_legend(left, title="layer")
    middle.bar(np.arange(layers), [layer.skew * 100 for layer in statistics.layers], color=colours)
    middle.set_xlabel("layer")
    middle.set_ylabel("% of neurons for 80 % of activations")
    for batch, style in enumerate(pick_styles(4)):
        shares = np.array([layer.batches[batch] * 100 for layer in statistics.layers])
        right.plot(np.arange(layers), shares, markersize=4, label=str(batch + 1), **style)
    right.set_xlabel("layer")
    right.set_ylabel("% of neurons active")
    add_legend(right, title="tokens in\na batch")
    figure.suptitle(f"{statistics.model}: {statistics.tokens} tokens")
    return save_figure(figure, file_format)


def count_rows(file: Path) -> int:
    """Rows of a Parquet file; UserError P540 if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(file)
        return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise UserError.of("P540", f"{file} is not a Parquet file: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecall:
    """A layer's neurons over the tokens of a text."""

    active: float
    """Share of neurons with a non-zero activation."""
    predicted: float
    """Share of neurons that the predictor names."""
    recall: float | None
    """Share of active neurons that it names; None if no neuron was active."""


def compute_scores(request: BuildRequest, layer: int, inputs: F32) -> F32:
    """Scores [T, neurons] of a layer's predictors for FFN inputs [T, hidden], of all experts."""
    scores = np.empty((len(inputs), request.neurons), np.float32)
    for expert, neurons in enumerate(_list_groups(request, layer)):
        inner, outer, bias = (
            _read(request, layer, kind, expert)
            for kind in ("predictor_in", "predictor_out", "predictor_bias")
        )
        scores[:, neurons] = np.maximum(inputs @ inner.T, 0) @ outer.T + bias
    return scores


def can_compare(request: BuildRequest) -> bool:
    has_predictors = name_layer_tensor(0, "predictor_in") in request.tensors
    return has_predictors and (request.model.moe is None or request.expert_neurons is not None)


def _list_groups(request: BuildRequest, layer: int) -> I32:
    """Stored indices [experts, ffn] of the neurons of a layer's experts, or of its one FFN."""
    every = np.arange(request.neurons, dtype=np.int32)
    order = every if request.expert_neurons is None else request.expert_neurons[layer]
    return order.reshape(request.model.expert_count, -1)


def _read(request: BuildRequest, layer: int, kind: str, expert: int) -> F32:
    whole: Tensor = request.tensors[name_layer_tensor(layer, kind)]
    tensor = slice_tensor(whole, expert, request.model.expert_count)
    if tensor.precision is None:
        return np.asarray(tensor.weights, np.float32)
    weights = np.asarray(tensor.weights).view(np.uint8)
    return find_packing(tensor.precision).dequantize(weights, tensor.scales, tensor.length)


class RecallCounter:
    """An observer of FFNs that compares predictors with what neurons do."""

    def __init__(self, request: BuildRequest) -> None:
        """The predictors are taken from ``request``."""
        self.threshold = 0.0
        """Score from which a neuron counts as predicted."""
        self._request = request
        self._counts: dict[int, I64] = {}

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        predicted = compute_scores(self._request, layer, inputs) >= self.threshold
        active = activations != 0
        possible = active.size
        if routing is not None:
            # Predictors of experts that do not compute a token are not asked.
            computing = routing.computes[:, routing.owners]
            predicted &= computing
            possible = int(computing.sum())
        counts = (possible, active.sum(), predicted.sum(), (active & predicted).sum())
        known = self._counts.setdefault(layer, np.zeros(4, np.int64))
        known += np.array(counts, np.int64)

    def describe_layers(self) -> list[LayerRecall]:
        return [
            LayerRecall(
                active=active / size,
                predicted=predicted / size,
                recall=found / active if active else None,
            )
            for size, active, predicted, found in (
                self._counts[layer].tolist() for layer in sorted(self._counts)
            )
        ]
