"""What the executor keeps for each chunk of a prompt: arrays, and calls of kernels with them."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.backends.compiler.runtime import BoundCall
from pi2.backends.cpu.arrays import Arrays
from pi2.backends.cpu.attention import PartCalls
from pi2.backends.cpu.neurons import NeighbourCalls


@dataclass(slots=True, kw_only=True)
class ChunkState:
    """A chunk of T tokens in the course of the layers."""

    tokens: int = 0
    arrays: Arrays
    embed: BoundCall
    embed_layers: BoundCall | None
    """Makes what layers have of their own, where they have something."""
    positions: BoundCall | None
    """Adds learned position vectors, where there are any."""
    attend: list[list[tuple[BoundCall, ...]]]
    """By sequence and layer; empty where rows are divided."""
    parts: list[tuple[PartCalls, ...]]
    """By layer, where rows of the attention block are divided; else empty."""
    begin: list[BoundCall]
    """By layer."""
    neighbours: list[NeighbourCalls]
    """By layer."""
    end: list[BoundCall]
    """By layer."""
    head: BoundCall


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCalls:
    """Calls for a step of several tokens; all others are those of chunk 0."""

    attend: list[tuple[PartCalls, ...]]
    """By layer; empty where steps have one token."""
    begin: list[BoundCall]
    """By layer."""
    end: list[BoundCall]
    """By layer."""
    embed_layers: BoundCall | None
    positions: list[BoundCall]
    """By token, for its position."""
