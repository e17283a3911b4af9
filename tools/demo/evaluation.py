"""How well the demo model predicts held-out text, and how much of it is active."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo.corpus import Corpus, encode
from demo.model import DemoModel, quantised_state

T = TypeVar("T")


def heldout_stream(corpus: Corpus) -> tuple[Tensor, int]:
    """Tokens of the held-out documents in one row, and their bytes."""
    ids = np.concatenate([encode(corpus.tokenizer, t) for t in corpus.heldout_texts])
    size = sum(len(t.encode()) for t in corpus.heldout_texts)
    return torch.from_numpy(ids.astype(np.int64)), size


def parallel(function: Callable[[int], T], items: Iterable[int], threads: int) -> list[T]:
    """The function's results, computed by threads with one core each."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(function, items))


def evaluate(
    model: DemoModel,
    stream: Tensor,
    length: int = 512,
    limit: int = 10**9,
    hook: Any = None,
    threads: int = 2,
) -> dict[str, Any]:
    """Loss per token and activation shares over windows that do not overlap."""
    layers = model.cfg.num_hidden_layers
    zero = torch.zeros(layers)

    @torch.no_grad()
    def run(start: int) -> tuple[float, Tensor, int]:
        row = stream[start : start + length + 1][None]
        logits, share = model(row[:, :-1], zero, hook=hook)
        n = row.shape[1] - 1
        return float(F.cross_entropy(logits[0], row[0, 1:], reduction="sum")), share.mean(1) * n, n

    results = parallel(run, range(0, min(len(stream), limit) - 1, length), threads)
    nll, count = sum(r[0] for r in results), sum(r[2] for r in results)
    shares = torch.stack([r[1] for r in results]).sum(0) / count
    return {
        "loss": nll / count,
        "perplexity": math.exp(nll / count),
        "nll": nll,
        "tokens": count,
        "activation": [round(float(s), 5) for s in shares],
    }


def quantised_copy(model: DemoModel) -> DemoModel:
    """A model with fake-quantised weights."""
    copy = DemoModel(model.cfg)
    copy.load_state_dict(quantised_state(model.state_dict()))
    return copy
