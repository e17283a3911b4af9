"""Neurons that share scales stay together, whatever the stored order is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pi2.arrays import I32, U8
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import GROUP


def keep_groups(model: Model, orders: I32) -> I32:
    """Stored orders [layers, neurons] in which neurons that share scales follow each other as in
    the checkpoint: of mxfp4, groups of 32 in the order of their mean places."""
    if model.quantization.ffn != "mxfp4":
        return orders
    places = np.argsort(orders, axis=1).reshape(len(orders), -1, GROUP)
    groups = np.argsort(places.mean(axis=2), axis=1, kind="stable")
    kept = groups[:, :, None] * GROUP + np.arange(GROUP)
    return kept.reshape(orders.shape).astype(np.int32)


def cut_groups(pieces: Iterable[U8]) -> Iterator[U8]:
    """The same neurons [n, stride] in pieces that are whole groups; so is their sum."""
    rest: U8 | None = None
    for piece in pieces:
        joined = piece if rest is None else np.concatenate([rest, piece])
        whole = len(joined) // GROUP * GROUP
        rest = joined[whole:] if whole < len(joined) else None
        if whole:
            yield joined[:whole]
    assert rest is None, len(rest)
