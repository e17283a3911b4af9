"""Scores of a model's predictions, window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pi2.arrays import F32, F64, I64
from pi2.engine.loaded_model import LoadedModel
from pi2.statistics.texts import Window

Mode = Literal["prefill", "decode"]

_ROWS = 16
"""Tokens whose logits are widened to float64 together."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a run said of the scored tokens of all windows, in order."""

    losses: F64
    """Negative log-likelihood of every scored token, in nats [tokens]."""
    choices: I64
    """The most likely token in its place [tokens]."""

    @property
    def perplexity(self) -> float:
        """Perplexity: exp of the mean loss."""
        return float(np.exp(self.losses.mean()))


def join_scores(pieces: Sequence[Scores]) -> Scores:
    """The scores of all windows of several runs."""
    return Scores(
        np.concatenate([piece.losses for piece in pieces]),
        np.concatenate([piece.choices for piece in pieces]),
    )


def score_windows(
    model: LoadedModel,
    windows: Sequence[Window],
    mode: Mode,
    progress: Callable[[float], None] = lambda share: None,
) -> Scores:
    """Score ``windows`` densely (``prefill``) or as a generation does (``decode``)."""
    losses, choices = [], []
    for number, window in enumerate(windows):
        tokens = np.array(window.tokens, np.int64)
        done = 0
        # The last token has nothing to predict.
        for logits in model.iterate_logits(window.tokens[:-1], mode=mode):
            skipped = max(0, window.first_scored - 1 - done)
            targets = tokens[done + 1 : done + 1 + len(logits)]
            done += len(logits)
            for start in range(skipped, len(logits), _ROWS):
                rows = slice(start, start + _ROWS)
                losses.append(compute_losses(logits[rows], targets[rows]))
                choices.append(logits[rows].argmax(-1))
        progress((number + 1) / len(windows))
    return Scores(np.concatenate(losses), np.concatenate(choices))


def compute_losses(logits: F32, targets: I64) -> F64:
    """Negative log-likelihoods [n], in nats, of ``targets`` [n] under ``logits`` [n, vocab]."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    norm = np.log(np.exp(scores).sum(axis=-1))
    return np.asarray(norm - scores[np.arange(len(targets)), targets])
