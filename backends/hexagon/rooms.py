"""Where arrays of the NPU lie in the memory that it shares with the engine; plain arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pi2.backends.hexagon.specification import LANES, LENGTH_STEP, FfnShape, Weights
from pi2.plan.weights.layout import GROUP, round_up

ALIGNMENT = 128
"""Bytes: every array begins at a multiple of it, a vector."""


@dataclass(frozen=True, slots=True)
class Room:
    """Arrays side by side, each at a multiple of 128 bytes."""

    places: Mapping[str, int]
    """Bytes from the start, by array."""
    bytes: int

    @classmethod
    def of(cls, **sizes: int) -> Room:
        """Lay out arrays of these sizes in bytes."""
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = end
            end = round_up(end + size, ALIGNMENT)
        return cls(places, end)


def count_row_bytes(weights: Weights, length: int) -> tuple[int, int]:
    """Bytes of a vector of ``length`` weights, and of its multipliers."""
    if weights == "int4":
        return length // 2, length // GROUP * 2
    return length, 0


def lay_out_neurons(shape: FfnShape, neurons: int) -> Room:
    """Room for ``neurons``, a multiple of 32."""
    assert neurons % LANES == 0, neurons
    codes, factors = count_row_bytes(shape.weights, shape.length)
    rows = neurons * shape.inputs
    return Room.of(
        weights=rows * codes,
        multipliers=rows * factors,
        row_scales=4 * rows,
        biases=4 * rows if shape.bias else 0,
        experts=4 * neurons if shape.experts else 0,
        down=neurons * shape.hidden,
        down_scales=4 * shape.hidden if neurons else 0,
    )


def place_piece(shape: FfnShape, room: Room, first: int, neuron: int) -> dict[str, int]:
    """Where arrays of a room at ``first`` begin for the neurons from ``neuron`` on, a multiple of
    32."""
    codes, factors = count_row_bytes(shape.weights, shape.length)
    steps = {
        "weights": shape.inputs * codes,
        "multipliers": shape.inputs * factors,
        "row_scales": 4,
        "biases": 4,
        "experts": 4,
        "down": LANES,
        "down_scales": 0,
    }
    return {name: first + room.places[name] + neuron * step for name, step in steps.items()}


def lay_out_matrix(weights: Weights, rows: int, length: int) -> Room:
    """Room for ``rows``, a multiple of 32, of ``length`` elements, a multiple of 64."""
    assert rows % LANES == 0 and length % LENGTH_STEP == 0, (rows, length)
    codes, factors = count_row_bytes(weights, length)
    return Room.of(weights=rows * codes, multipliers=rows * factors, row_scales=4 * rows)


def lay_out_job(tokens: int, length: int, groups: int, experts: int, width: int) -> Room:
    """Room for what a job of ``tokens`` reads and writes: inputs of at most ``length`` elements,
    with at most ``groups`` offsets, and results of at most ``width``."""
    return Room.of(
        inputs=tokens * length,
        offsets=4 * tokens * groups,
        scales=4 * tokens,
        routes=4 * tokens * experts,
        results=4 * tokens * width,
    )
