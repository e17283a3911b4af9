"""The index that chooses keys for attention."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.contract import KV_TYPES
from pi2.backends.blocks.sizes import LIST_HEAD
from pi2.backends.reference.index import choose_keys
from pi2.backends.reference.instructions.arguments import Arguments, widen
from pi2.backends.reference.instructions.attention import keep
from pi2.plan.arithmetic.units import find_index_type


def keep_index(own: Arguments) -> None:
    """Append keys of the index."""
    own.kv = find_index_type(own.kv)
    keep(own)


def _score(own: Arguments, token: int, end: int) -> F32:
    """Return the scores [lists, end] of tokens before a token."""
    heads, width = own.heads, own.width
    queries = own.view("queries", (heads, width), skip=token * own.query_stride)
    skip = int(own.numbers("sequences", token + 1)[token]) * own.key_sequence_stride
    dtype = KV_TYPES[find_index_type(own.kv)]
    keys = own.view("key_cache", (end, width), dtype=dtype, skip=skip)
    scores = widen(queries) @ widen(keys).T
    if own.has_weights:
        weights = own.view("weights", (heads,), skip=token * own.weights_stride)
        scores = (widen(weights) @ np.maximum(scores, 0))[None]
    return scores.astype(np.float32)


def _find_end(own: Arguments, token: int) -> int:
    return int(own.numbers("positions", token + 1)[token]) + 1


def rank(own: Arguments) -> None:
    """Write scores of parts of contexts; of a context of one part, `choose` makes them itself."""
    for item in own.items.tolist() if own.parts > 1 else ():
        token, part = divmod(item, own.parts)
        end = _find_end(own, token)
        each = -(-end // (own.parts * 16)) * 16
        place = slice(part * each, min((part + 1) * each, end))
        if end > own.reach and place.start < place.stop:
            row = token * own.lists * own.scores_stride
            scores = own.view("scores", (own.lists, end), (own.scores_stride, 1), skip=row)
            scores[:, place] = _score(own, token, end)[:, place]


def choose(own: Arguments) -> None:
    """Write the lists of tokens that see more than ``reach`` tokens."""
    for token in own.items.tolist():
        end, row = _find_end(own, token), token * own.lists * own.scores_stride
        if end <= own.reach:
            continue
        scores = (
            own.view("scores", (own.lists, end), (own.scores_stride, 1), skip=row)
            if own.parts > 1
            else _score(own, token, end)
        )
        found = choose_keys(
            scores[:, None], end - 1, chosen=own.count, block=own.block, local=own.local
        )
        for number, flags in enumerate(found[:, 0]):
            places = np.flatnonzero(flags)
            skip = (token * own.lists + number) * own.list_stride
            own.numbers("chosen", 1, skip)[:] = len(places)
            own.numbers("chosen", len(places), skip + LIST_HEAD)[:] = places
