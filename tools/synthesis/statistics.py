"""Statistics of activations, and the files that keep them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from pi2.arrays import I64, Bits, Raw
from synthesis.hotness import find_skew


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStatistics:
    """Measured over a sample of tokens; shares are of the layer's neurons, in a mixture of those
    of a token's active experts."""

    active: float
    """Mean share of neurons with a non-zero activation (SiLU: with a positive gate)."""
    active_deviation: float
    """Standard deviation of ``active`` over tokens."""
    gate_positive: float
    """Mean share of neurons whose gate is above the activation's threshold."""
    skew: float
    """Share of the neurons, the first in stored order, that makes 80 % of the activations."""
    first_half: float
    """Share of the activations that the first half of the neurons in stored order makes."""
    predicted: float | None
    """Mean share of neurons whose predictor score reaches the threshold."""
    recall: float | None
    """Share of the active neurons that were predicted."""
    overlap: float
    """Share of a token's active neurons that were active for the token before."""
    overlap_by_chance: float
    """Overlap if tokens had nothing to do with each other, every neuron firing as often."""
    least_load: float | None = None
    """Share of the tokens that the least busy expert computes; None without experts."""
    most_load: float | None = None
    """Share of the tokens that the busiest expert computes."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How alike the active neurons of tokens are."""

    successive: float
    chance: float


def compute_overlap(active: Bits) -> Overlap:
    """Overlap of successive tokens in ``active`` [tokens, neurons], and of any two.

    Chance is taken over all pairs of tokens: c (c - 1) / (T (T - 1)) estimates the square of a
    neuron's chance without the bias of c / T squared.
    """
    tokens, counts = len(active), active.sum(axis=0, dtype=np.int64)
    both = int((active[1:] & active[:-1]).sum())
    total = int(active[1:].sum())
    pairs = counts * (counts - 1)
    chance = float(pairs.sum()) / max(1, tokens - 1) / max(1, int(counts.sum()))
    return Overlap(successive=both / max(1, total), chance=chance)


def compute_skew(counts: Raw) -> float:
    """Share of the neurons, in stored order, that makes 80 % of ``counts`` [neurons].

    The order is known before the sample is drawn.  Sorting by the counts themselves would make
    neurons that fired once by luck look hotter than those that did not.
    """
    return find_skew(counts)


def average_layers(layers: Sequence[LayerStatistics]) -> dict[str, float | None]:
    """Means over layers of every statistic."""
    means: dict[str, float | None] = {}
    for item in fields(LayerStatistics):
        values = [getattr(layer, item.name) for layer in layers]
        means[item.name] = None if None in values else float(np.mean(values))
    return means


def describe_layers(layers: Sequence[LayerStatistics]) -> list[dict[str, float | None]]:
    """Every layer's statistics as plain values, rounded to what a sample can tell."""
    return [round_values(asdict(layer)) for layer in layers]


def round_values(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Four digits after the point."""
    return {name: None if x is None else round(x, 4) for name, x in values.items()}


def write_counts(counts: I64, tokens: int, identity: Mapping[str, str]) -> bytes:
    """``activations.parquet``: layer, neuron (original index), count; the file's bytes.

    ``identity``: of which model, as `pi2.importing.conversion_job.note_identity` says.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    layers, neurons = counts.shape
    table = pa.table(
        {
            "layer": pa.array(np.repeat(np.arange(layers, dtype=np.int16), neurons)),
            "neuron": pa.array(np.tile(np.arange(neurons, dtype=np.int32), layers)),
            "count": pa.array(counts.reshape(-1)),
        }
    ).replace_schema_metadata({**identity, "tokens": str(tokens), "synthetic": "true"})
    target = io.BytesIO()
    pq.write_table(table, target)
    return target.getvalue()
