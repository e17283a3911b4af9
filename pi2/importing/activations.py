"""Activation counts, and the order of neurons that follows from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pi2.arrays import I32, I64
from pi2.diagnostics import UserError
from pi2.plan.documents.model import Model
from pi2.regular_file import check_regular
from pi2.store.identity import identify_weights
from pi2.store.reader import NeuronStore

MODEL_NOTE, WEIGHTS_NOTE = "pi2.model", "pi2.weights"
"""Keys beside the columns of counts: the model's name, and what tells its weights from others'."""
EXPERT_BANDS = 32
"""Bands of a layer within which the neurons of an expert lie together."""


def note_identity(store: NeuronStore) -> dict[str, str]:
    """What files of counts say of the store that they were counted with."""
    return {
        MODEL_NOTE: store.manifest.model.id,
        WEIGHTS_NOTE: identify_weights(store.tensors),
    }


def read_counts(path: Path, layers: int, neurons: int) -> I64:
    """Read a Parquet file with the columns layer, neuron, count: int64 [layers, neurons].

    Raises `UserError` P540 if it is not such a file, or not of this model.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ("layer", "neuron", "count")
    try:
        check_regular(path)
        table = pq.read_table(path, columns=list(columns))
        if any(table.column(name).null_count for name in columns):
            raise ValueError("a value is missing")
        layer, neuron, count = (table.column(name).cast(pa.int64()).to_numpy() for name in columns)
    except FileNotFoundError:
        raise UserError.of(
            "P540",
            f"no activation counts at {path}",
            help="record them: `pi2 activations PLAN --text FILE -o STATS`",
        ) from None
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _bad_counts(path, reason) from None
    if len(layer) != layers * neurons:
        problem = f"{len(layer)} rows, not one for each of {layers} layers x {neurons} neurons"
        raise _bad_counts(path, problem)
    inside = (layer >= 0) & (layer < layers) & (neuron >= 0) & (neuron < neurons)
    if not inside.all():
        raise _bad_counts(path, f"a layer or neuron outside of {layers} x {neurons}")
    place = layer * neurons + neuron
    if len(np.unique(place)) != len(place):
        raise _bad_counts(path, "a neuron that is listed twice")
    if (count < 0).any():
        raise _bad_counts(path, "a negative count")
    counts = np.empty(layers * neurons, np.int64)
    counts[place] = count
    return counts.reshape(layers, neurons)


def order_neurons(counts: I64) -> I32:
    """Stored order int32 [layers, neurons]: most active first, equals as in the checkpoint."""
    return np.argsort(-counts, axis=1, kind="stable").astype(np.int32)


def check_experts(model: Model) -> None:
    """`UserError` P524 if there is no order by expert of the neurons of ``model``."""
    if model.moe is None:
        raise UserError.of(
            "P524",
            f"{model.id!r} is not a mixture of experts: it has no order by expert",
            help="leave the neurons in the order of hotness",
        )


def count_bands(model: Model) -> int:
    """Bands of hotness in the order by expert: without predictors experts are needed as a whole,
    and each lies in one stretch."""
    return EXPERT_BANDS if model.predictor is not None else 1


def group_experts(order: I32, ffn: int, bands: int = EXPERT_BANDS) -> I32:
    """The stored order [neurons] of a mixture's layer by expert, from that by hotness.

    In equal ``bands`` of hotness every expert's neurons (of the checkpoint: its number
    times ``ffn`` and what follows) lie together, the most active first.  So what is hot comes first
    to within a band, whatever a plan has room for, and what a token of few experts misses lies
    closer together.  In one band the experts that are used most come first.
    """
    owners = order // ffn
    if bands == 1:
        places = np.bincount(owners, weights=np.arange(len(order)))
        rank = np.argsort(np.argsort(places, kind="stable"), kind="stable")
        return order[np.argsort(rank[owners], kind="stable")]
    band = np.arange(len(order), dtype=np.int64) * bands // len(order)
    return order[np.lexsort((owners, band))]


def _bad_counts(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P540",
        f"{path} does not have the activation counts of this model: {problem}",
        help="give a Parquet file with the columns layer, neuron and count",
    )
