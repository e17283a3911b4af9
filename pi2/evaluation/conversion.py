"""What quantisation costs: perplexity by a checkpoint's weights, and by those of its store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.diagnostics import UserError
from pi2.engine.loading import read_tokenizer
from pi2.evaluation.layerwise import score_layerwise
from pi2.evaluation.weights import CheckpointWeights, StoreWeights
from pi2.importing.checkpoint import open_checkpoint
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.sandbox.tokenizer import encode_text
from pi2.statistics.texts import Window, cut_windows
from pi2.store.reader import NeuronStore

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
    """Score ``texts`` by both weights, every neuron computed, activations in float32.

    Memory does not grow with the model's layers (`pi2.evaluation.layerwise`).  Raises `UserError`
    P660 if the text has fewer than two tokens, and as opening checkpoint and store does.
    """
    with NeuronStore.open(store, model=model) as opened:
        windows = _cut(opened, model, texts)
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


def _cut(store: NeuronStore, model: Model, texts: Sequence[str]) -> list[Window]:
    """`WINDOWS` windows, spread over the texts."""
    tokenizer = read_tokenizer(store.tokenizer_path)
    begin = model.tokenizer.bos if model.tokenizer.add_bos else None
    context = min(CONTEXT, model.shape.context)
    windows: list[Window] = []
    for text in texts:
        ids = encode_text(tokenizer, text)
        windows += cut_windows(ids, begin=begin, context=context, stride=context)
    if not windows:
        raise UserError.of(
            "P660", "the text has fewer than two tokens", help="give a few pages of text"
        )
    if len(windows) <= WINDOWS:
        return windows
    chosen = np.linspace(0, len(windows) - 1, WINDOWS).round().astype(int)
    return [windows[index] for index in chosen]
