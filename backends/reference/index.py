"""The index of the reference backend, which chooses the keys that queries attend to."""

import numpy as np

from pi2.arrays import F32, Bits


def choose_keys(scores: F32, position: int, *, chosen: int, block: int, local: int) -> Bits:
    """Which keys [lists, T, end] tokens from ``position`` on attend to, by their scores; of equal
    ones, the first counts.  See `pi2.plan.documents.model_mixing.Index`."""
    lists, count, end = scores.shape
    now = np.arange(position, position + count)[:, None]
    seen = np.where(np.arange(end)[None] <= now, scores, -np.inf)
    blocks = -(-end // block)
    filled = np.full((lists, count, blocks * block), -np.inf, np.float32)
    filled[..., :end] = seen
    best = filled.reshape(lists, count, blocks, block).max(-1)
    own, numbers = now // block, np.arange(blocks)[None]
    best = np.where((numbers <= own) & (numbers > own - local), np.inf, best)
    order = np.argsort(-best, axis=-1, kind="stable")[..., :chosen]
    found = np.zeros(best.shape, bool)
    np.put_along_axis(found, order, True, axis=-1)
    return np.repeat(found, block, axis=-1)[..., :end]
