"""llama.cpp over the same file and the same tokens: losses, choices, and how far pi2's are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, F64
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.measuring.evaluation import Scores, compute_losses
from pi2.measuring.texts import Window


def score_beside(
    model: LoadedModel,
    windows: Sequence[Window],
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Scores, float]:
    """llama.cpp's scores of ``windows`` on the file that ``model`` runs, and the mean KL divergence
    from its distributions to pi2's, in nats.

    `UserError` P663 where the model is no GGUF file, or llama-cpp-python is not installed.
    """
    if model.plan.file is None:
        raise UserError.of(
            "P663",
            "llama.cpp is compared on the same file, and this plan runs a store",
            help="name a GGUF file: `pi2 evaluate FILE.gguf --against llama.cpp --text TEXT`",
        )
    context = max(len(window.tokens) for window in windows)
    peer = _open_peer(model.plan.file.path, context)
    losses, choices, divergences = [], [], []
    for number, window in enumerate(windows):
        given = list(window.tokens[:-1])
        peer.reset()
        peer.eval(given)
        theirs = np.array(peer.scores[: len(given)], np.float32)
        targets, done = np.array(window.tokens, np.int64), 0
        for logits in model.iterate_logits(given):
            first = max(0, window.first_scored - 1 - done)
            rows = theirs[done + first : done + len(logits)]
            losses.append(compute_losses(rows, targets[done + first + 1 : done + len(logits) + 1]))
            choices.append(rows.argmax(-1))
            divergences.append(_diverge(rows, logits[first:, : rows.shape[1]]))
            done += len(logits)
        progress((number + 1) / len(windows))
    peer.close()
    scores = Scores(np.concatenate(losses), np.concatenate(choices))
    return scores, float(np.concatenate(divergences).mean())


def _open_peer(file: Path, context: int) -> Any:
    if find_spec("llama_cpp") is None:
        raise UserError.of(
            "P663",
            "llama-cpp-python is not installed",
            help="pip install 'pi2[bench]' compiles it, which takes about ten minutes",
        )
    import llama_cpp

    return llama_cpp.Llama(
        os.fspath(file),
        n_ctx=context,
        n_batch=context,
        n_threads=os.cpu_count() or 1,
        logits_all=True,
        verbose=False,
    )


def _diverge(theirs: F32, ours: F32) -> F64:
    """KL divergences [n] from distributions of logits ``theirs`` to ``ours`` [n, vocab]."""
    found = []
    for first, second in zip(theirs, ours, strict=True):
        pair = np.stack([first, second]).astype(np.float64)
        pair -= pair.max(axis=1, keepdims=True)
        pair -= np.log(np.exp(pair).sum(axis=1, keepdims=True))
        found.append(float((np.exp(pair[0]) * (pair[0] - pair[1])).sum()))
    return np.array(found)
