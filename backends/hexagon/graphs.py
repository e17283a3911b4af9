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
from pi2.plan.arithmetic.units import pad_tokens
from pi2.plan.weights.layout import Precision, round_up

TOKENS = (1, 2, 4, 32, 64, 128)
"""Tokens of graphs, unless a plan says otherwise: steps of few sequences, and chunks of prompts."""


MOST_SIZES = 8
"""Numbers of neurons that graphs have, unless a plan names more."""


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a job that one graph computes."""

    first: int
    """Its first token."""
    count: int
    """Tokens that the job has of it."""
    tokens: int
    """Tokens of the graph."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neurons of a layer that one graph computes."""

    first: int
    count: int
    """Neurons that are asked for."""
    neurons: int
    """Neurons of the graph."""


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


def find_most_padded(most: int, graphs: Sequence[int]) -> int:
    """Largest ``pad_tokens`` of jobs of up to ``most`` tokens."""
    return max(pad_tokens(count, graphs) for count in range(1, most + 1))


def choose_neurons(wanted: Iterable[int], most: int | None = None) -> tuple[int, ...]:
    """Numbers of neurons of graphs, ascending: each of ``wanted``, or an equal part of it that has
    no more than ``most``; some of them where they are many."""
    found = set()
    for count in wanted:
        parts = 1 if most is None else -(-count // max(most, LANES))
        if count > 0:
            found.add(round_up(-(-count // parts), LANES))
    ordered = sorted(found)
    if len(ordered) > MOST_SIZES:
        last = len(ordered) - 1
        ordered = [ordered[last * place // (MOST_SIZES - 1)] for place in range(MOST_SIZES)]
    return tuple(ordered)


def cut_neurons(count: int, graphs: Sequence[int]) -> list[Piece]:
    """Divide ``count`` neurons among graphs of ascending sizes: as many of the largest as fit, then
    the smallest that holds the rest."""
    pieces, first = [], 0
    while first < count:
        rest = count - first
        size = next((item for item in graphs if item >= rest), graphs[-1])
        pieces.append(Piece(first, min(rest, size), size))
        first += size
    return pieces


def find_room(count: int, graphs: Sequence[int]) -> int:
    """Neurons that graphs compute for ``count``: there must be room for them."""
    return sum(piece.neurons for piece in cut_neurons(count, graphs))


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
