"""Activity that was counted: the file of activations in a neuron store."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from pi2.arrays import F64
from pi2.costs.activations import CLASSES, Hotness

COUNTS_FILE = "activations.parquet"
_NORMAL = NormalDist()
_RARE = 4
"""Counts up to which chance decides what was counted."""
_ENOUGH = 30
"""Neurons with a count from which their number is known well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedHotness(Hotness):
    """Chances of each class as counted over many tokens."""

    chances: tuple[float, ...]
    """Chances of the [CLASSES] classes, hottest first."""

    def compute_chances(self, shift: float = 0.0) -> F64:
        """The counted chances: they are means over tokens already, whatever ``shift`` is."""
        del shift
        return np.array(self.chances)


def read_counts(store: Path, layers: int, neurons: int) -> F64 | None:
    """Share of tokens that activate each neuron [layers, neurons], hottest first; None where the
    store has no such file, or not for this model."""
    path = store / COUNTS_FILE
    if not path.is_file():
        return None
    return _read_counts(path, path.stat().st_mtime_ns, layers, neurons)


@lru_cache(maxsize=4)
def _read_counts(path: Path, _changed: int, layers: int, neurons: int) -> F64 | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["layer", "neuron", "count"])
        tokens = int((table.schema.metadata or {}).get(b"tokens", b"0"))
        places = np.asarray(table["layer"]).astype(np.int64) * neurons
        places += np.asarray(table["neuron"])
        counts = np.zeros(layers * neurons)
        counts[places] = np.asarray(table["count"])
    except (OSError, ValueError, KeyError, IndexError, pa.ArrowException):
        return None
    if tokens <= 0:
        return None
    rows = counts.reshape(layers, neurons)
    shares = np.minimum(np.stack([_expect_counts(row) for row in rows]) / tokens, 1.0)
    shares.sort(axis=1)
    return np.asarray(shares[:, ::-1])


def _expect_counts(counts: F64) -> F64:
    """What as many other tokens are expected to count for neurons with these counts [neurons].

    Neurons that a sample never saw are used, too, and those that it saw once are used less: Good
    and Turing's estimate, (c + 1) N(c + 1) / N(c), where N(c) neurons have the count c.
    """
    expected = counts.copy()
    sizes = np.bincount(counts.astype(np.int64), minlength=_RARE + 2)
    last = 0.0
    for count in range(_RARE + 1):
        if min(sizes[count], sizes[count + 1]) < _ENOUGH:
            break
        last = max(last, float((count + 1) * sizes[count + 1] / sizes[count]))
        expected[counts == count] = min(last, count + 1.0)
    return expected


def make_counted(shares: F64, named: float) -> CountedHotness:
    """The distribution of a layer whose neurons are active for ``shares`` [neurons] of the tokens
    while the engine computes the share ``named`` of them.

    A predictor names more than what is active: as if every neuron's threshold were lower by the
    same amount, so that rare ones gain most.
    """
    size = len(shares) // CLASSES
    classes = shares[: size * CLASSES].reshape(CLASSES, size).mean(axis=1)
    active = float(classes.mean())
    safe = np.clip(classes, 1e-4, 1.0 - 1e-4)
    inputs = np.array([_NORMAL.inv_cdf(chance) for chance in safe.tolist()])
    low, high = -4.0, 4.0
    for _ in range(40):
        shift = (low + high) / 2
        low, high = (shift, high) if _name(inputs, shift).mean() < named else (low, shift)
    chances = _name(inputs, (low + high) / 2) if named > active else classes * (named / active)
    return CountedHotness(
        active=float(chances.mean()), spread=0.0, chances=tuple(np.minimum(chances, 1.0).tolist())
    )


def _name(inputs: F64, shift: float) -> F64:
    return np.array([_NORMAL.cdf(value + shift) for value in inputs.tolist()])
