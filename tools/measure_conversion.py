"""Measure what a conversion costs: perplexity by a checkpoint's weights and by its store's.

    python tools/measure_conversion.py CHECKPOINT STORE --text FILE [--model FILE]

Scores up to 8 windows of 256 tokens densely in float32, layer by layer: two operations per weight
and token each time, with one layer in memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from layerwise import (
    PIECE_NEURONS,
    CheckpointWeights,
    LayerExecutor,
    NeuronPiece,
    Weights,
    run_layers,
)
from pi2.arrays import F32, I64
from pi2.cli.options import read_model
from pi2.engine.loading import read_tokenizer
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.measuring.texts import Passages, Scores, Window, read_texts
from pi2.model.tensor import EMBEDDING, HEAD, HEAD_BIAS
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_factors, unpack_part
from pi2.progress import Progress, ProgressBar, ignore_progress
from pi2.store.reader import NeuronStore


class StoreWeights:
    """The weights as a neuron store has them."""

    def __init__(self, store: NeuronStore) -> None:
        self._store = store

    def read(self, name: str, rows: slice | I64 | None = None) -> F32:
        tensor = self._store.tensors[name]
        wanted = slice(None) if rows is None else rows
        weights = tensor.weights[wanted]
        if tensor.precision is None:
            return np.asarray(weights, np.float32)
        scales = None if tensor.scales is None else tensor.scales[wanted]
        return find_packing(tensor.precision).dequantize(
            weights.view(np.uint8), scales, tensor.length
        )

    def list_neurons(self, layer: int) -> Iterator[NeuronPiece]:
        layout, stored = self._store.bundle.inline, self._store.layers[layer]
        for start in range(0, stored.neurons, PIECE_NEURONS):
            bundles = stored.read_inline(slice(start, start + PIECE_NEURONS))
            inputs = range(len(layout.parts) - 1)
            down = unpack_part(bundles, layout, len(layout.parts) - 1)
            if layout.factor_offset is not None:
                down = down * slice_factors(bundles, layout)[:, None]
            yield NeuronPiece(
                rows=tuple(unpack_part(bundles, layout, index) for index in inputs),
                down=down,
                biases=tuple(slice_bias(bundles, layout, index) for index in inputs)
                if layout.biases
                else (),
                experts=None if layout.expert_offset is None else slice_experts(bundles, layout),
            )


_BLOCK = 8192
"""Rows of the head that are widened together."""


def score_layerwise(
    weights: Weights,
    model: Model,
    windows: Sequence[Window],
    progress: Callable[[float], None] = lambda share: None,
) -> Scores:
    """Score ``windows``; neurons are computed densely."""
    context = max(len(window.tokens) for window in windows)
    found = run_layers(LayerExecutor(weights, model, context, len(windows)), windows, progress)
    scored = (window.first_scored - 1 for window in windows)
    inputs = np.concatenate([own[first:] for own, first in zip(found, scored, strict=True)])
    targets = np.concatenate(
        [np.array(window.tokens[window.first_scored :], np.int64) for window in windows]
    )
    scores = _score_head(weights, model, inputs, targets)
    progress(1.0)
    return scores


def _score_head(weights: Weights, model: Model, inputs: F32, targets: I64) -> Scores:
    """Losses of ``targets`` [n] after normalised ``inputs`` [n, hidden], by blocks of the head."""
    name, vocab = (EMBEDDING if model.tied_head else HEAD), model.shape.vocab
    count, bias = len(inputs), weights.read(HEAD_BIAS)[0] if model.head_bias else None
    best = np.full(count, -np.inf)
    choices = np.zeros(count, np.int64)
    sums, wanted = np.zeros(count), np.zeros(count)
    for start in range(0, vocab, _BLOCK):
        head = weights.read(name, slice(start, min(start + _BLOCK, vocab)))
        scores = inputs @ head.T + (0.0 if bias is None else bias[start : start + len(head)])
        logits = (scores * np.float32(model.multipliers.logits)).astype(np.float64)
        if model.logit_softcap is not None:
            logits = np.tanh(logits / model.logit_softcap) * model.logit_softcap
        top = logits.argmax(axis=1)
        value = logits[np.arange(count), top]
        choices = np.where(value > best, start + top, choices)
        higher = np.maximum(best, value)
        sums = sums * np.exp(best - higher) + np.exp(logits - higher[:, None]).sum(axis=1)
        best = higher
        inside = (targets >= start) & (targets < start + len(head))
        wanted[inside] = logits[inside, targets[inside] - start]
    return Scores(np.log(sums) + best - wanted, choices)


WINDOWS = 8
CONTEXT = 256
"""Tokens of a window: few, because each takes two operations for every weight of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionCost:
    """A checkpoint and its store, compared on the same tokens in float32."""

    tokens: int
    """Number of scored tokens."""
    windows: int
    context: int
    """Length of the longest window in tokens."""
    before: float
    """Perplexity by the checkpoint's own weights."""
    after: float
    """Perplexity by the weights in the store."""
    loss_change: float
    """Mean loss of a token after, less that before, in nats."""
    loss_change_error: float
    """Standard error of ``loss_change``, token by token."""
    agreement: float
    """Share of tokens for which both find the same token most likely."""


def measure_conversion(
    checkpoint: Path,
    model: Model,
    store: Path,
    texts: Sequence[str],
    *,
    progress: Progress = ignore_progress,
) -> ConversionCost:
    """Score ``texts`` by both weights, densely in float32; UserError P660 for too little text."""
    with NeuronStore.open(store, model=model) as opened:
        context = min(CONTEXT, model.shape.context)
        tokenizer = read_tokenizer(opened.tokenizer_path)
        windows = Passages(texts, count=WINDOWS).cut_for(tokenizer, model, context, context)
        source = CheckpointWeights(open_checkpoint(checkpoint), model)
        before = score_layerwise(
            source, model, windows, lambda share: progress("the checkpoint's perplexity", share)
        )
        after = score_layerwise(
            StoreWeights(opened),
            model,
            windows,
            lambda share: progress("the store's perplexity", share),
        )
    change = after.losses - before.losses
    return ConversionCost(
        tokens=len(change),
        windows=len(windows),
        context=max(len(window.tokens) for window in windows),
        before=before.perplexity,
        after=after.perplexity,
        loss_change=float(change.mean()),
        loss_change_error=float(change.std() / np.sqrt(len(change))),
        agreement=float((before.choices == after.choices).mean()),
    )


def describe_cost(cost: ConversionCost) -> str:
    return (
        f"perplexity of {cost.tokens} tokens: {cost.before:.3f} by the checkpoint's weights, "
        f"{cost.after:.3f} by the store's ({cost.loss_change:+z.2%} ± "
        f"{cost.loss_change_error:.2%}); same top token {cost.agreement:.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--model", help="its document; by default the one in the store's folder")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    model = given.model or str(next(given.store.glob("*.model.toml")))
    with ProgressBar() as progress:
        cost = measure_conversion(
            given.checkpoint,
            read_model(model),
            given.store,
            read_texts(given.text),
            progress=progress,
        )
    print(json.dumps(asdict(cost)) if given.json else describe_cost(cost))
    return 0


if __name__ == "__main__":
    sys.exit(main())
