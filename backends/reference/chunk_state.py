"""What the executor keeps for each chunk of a prompt, T tokens in the course of the layers."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.arrays import F32


@dataclass(slots=True, kw_only=True)
class ChunkState:
    """Arrays are replaced from step to step; before a layer has begun, they have no meaning but
    for x, ``added`` and ``streams``."""

    x: F32
    """What goes from layer to layer [T, hidden]."""
    input: F32
    """What attention of the layer reads, before its norm [T, hidden]."""
    u: F32
    """What the FFN reads [T, hidden]."""
    v: F32
    """What its neurons read [T, neuron width]: u, or what is made of it for experts of another
    width."""
    routes: F32
    """Weights of experts [T, experts]."""
    y: F32
    """The sum of its neurons [T, neuron width]."""
    squares: F32
    """Sums of the squares of the FFN's activations [T], for their norm."""
    added: F32
    """Embeddings that layers have of their own [layers, T, width]."""
    streams: F32
    """Residual streams beside x [streams - 1, T, hidden]."""
    cutoffs: F32 | None = None
    """Cutoffs of the layer's gates [T, 1], where it has them."""


def begin_chunk(x: F32, added: F32, streams: F32) -> ChunkState:
    """Return the state of tokens whose embeddings are ``x``."""
    return ChunkState(
        x=x, input=x, u=x, v=x, routes=x, y=x, squares=x, added=added, streams=streams
    )
