"""Work on a row of neurons of several experts, expert by expert: each with its own tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pi2.arrays import F32, I32


def list_groups(experts: I32, routes: F32) -> Iterator[tuple[I32, I32]]:
    """Give the places of an expert's neurons, and its tokens, for every expert that has both.

    ``experts`` [n] of the neurons; ``routes`` [T, experts], not 0 where an expert computes a token.
    """
    # A radix sort, where integers are short.
    order = np.argsort(experts.astype(np.uint16), kind="stable").astype(np.int32)
    counts = np.bincount(experts)
    # A few of many experts, where neurons are stored by expert.
    present, start = counts.nonzero()[0], 0
    for expert, count in zip(present.tolist(), counts[present].tolist(), strict=True):
        end = start + count
        tokens = routes[:, expert].nonzero()[0].astype(np.int32)
        if len(tokens):
            yield order[start:end], tokens
        start = end


def complete_pairs(tokens: I32, count: int) -> I32:
    """``tokens``, ascending, of ``count``, with the other of each two that are computed together:
    tokens 0 and 1, 2 and 3, ..."""
    pairs = np.unique(tokens // 2)
    both = (2 * pairs[:, None] + np.arange(2)).reshape(-1)
    return both[both < count].astype(np.int32)
