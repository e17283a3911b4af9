"""Which graphs a unit has, and which of them a job runs; plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pi2.backends.hexagon.specification import (
    LANES,
    LENGTH_STEP,
    FfnGraph,
    ProductGraph,
    choose_weights,
)
from pi2.plan.weights.layout import Precision, round_up

TOKENS = (1, 2, 4, 32, 64, 128)
"""Tokens of graphs, unless a plan says otherwise: steps of few sequences, and chunks of prompts."""


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a job that one graph computes."""

    first: int
    """Its first token."""
    count: int
    """Tokens that the job has of it."""
    tokens: int
    """Tokens of the graph."""


def choose_tokens(most: int, allowed: Sequence[int] = TOKENS) -> tuple[int, ...]:
    """Token counts of graphs, ascending, for jobs of up to ``most`` tokens: none that is larger
    than it takes to hold them."""
    ordered = sorted(allowed)
    enough = next((tokens for tokens in ordered if tokens >= most), ordered[-1])
    return tuple(tokens for tokens in ordered if tokens <= enough)


def cut_tokens(count: int, graphs: Sequence[int]) -> list[Run]:
    """Divide a job of ``count`` tokens among graphs of ascending numbers of tokens: as many of the
    largest as fit, then the smallest that holds the rest."""
    runs, first = [], 0
    while first < count:
        rest = count - first
        tokens = next((item for item in graphs if item >= rest), graphs[-1])
        runs.append(Run(first, min(rest, tokens), tokens))
        first += tokens
    return runs


def count_padded(count: int, graphs: Sequence[int]) -> int:
    """Tokens that graphs compute for a job of ``count``."""
    return sum(run.tokens for run in cut_tokens(count, graphs))


def find_most_padded(most: int, graphs: Sequence[int]) -> int:
    """Largest ``count_padded`` of jobs of up to ``most`` tokens."""
    return max(count_padded(count, graphs) for count in range(1, most + 1))


def choose_neurons(wanted: Iterable[int]) -> tuple[int, ...]:
    """Numbers of neurons of graphs, ascending, that hold each of ``wanted`` without loss."""
    return tuple(sorted({round_up(count, LANES) for count in wanted if count > 0}))


def find_room(count: int, graphs: Sequence[int]) -> int:
    """Neurons of the smallest graph that holds ``count``, 0 for none."""
    return next(item for item in (0, *graphs) if item >= count)


def list_ffn_graphs(tokens: Sequence[int], neurons: Sequence[int]) -> tuple[FfnGraph, ...]:
    """A graph for every number of tokens and of neurons."""
    return tuple(FfnGraph(tokens=t, neurons=n) for t, n in product(tokens, neurons))


def list_product_graphs(
    matrices: Mapping[str, tuple[int, int, Precision]], tokens: Sequence[int]
) -> tuple[ProductGraph, ...]:
    """A graph for every number of tokens and shape of a matrix: rows, length and precision."""
    shapes = {
        (round_up(rows, LANES), round_up(length, LENGTH_STEP), choose_weights(precision))
        for rows, length, precision in matrices.values()
    }
    return tuple(
        ProductGraph(tokens=count, rows=rows, length=length, weights=weights)
        for count, (rows, length, weights) in product(tokens, sorted(shapes))
    )
