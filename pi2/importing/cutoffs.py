"""The matrix that tells the cutoffs of a layer's gates (`pi2.plan.weights.cutoffs`), made of the
checkpoint's gates."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi2.arrays import F32, F64, Raw
from pi2.importing.ffn_rows import find_ffn_rows
from pi2.importing.rows import Rows
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.model import Model
from pi2.plan.weights.cutoffs import has_remainders, list_cutoff_matrices

_BLOCK = 4096
"""Gates that are in memory at once."""


class CutoffMaker:
    """Makes the matrix when it is first asked for; several threads may ask."""

    def __init__(self, gates: Rows, deviations: float, has_remainders: bool) -> None:
        """``deviations``: how many of them the cutoff is above the mean of ``gates``.
        ``has_remainders``: whether rows follow that have what fp16 leaves of the first."""
        self._gates = gates
        self._deviations = deviations
        self._has_remainders = has_remainders
        self._made: F32 | None = None
        self._lock = threading.Lock()

    def make(self) -> F32:
        """The mean gate row, and rows whose products with an input are, as a vector, as long as
        the deviations: float32 [1 + min(n, hidden), hidden], or twice as many rows."""
        with self._lock:
            if self._made is None:
                self._made = self._compute()
            return self._made

    def _compute(self) -> F32:
        count = self._gates.count
        mean, factor = _factor_products(self._gates)
        scale = abs(self._deviations) / math.sqrt(count)
        matrix = np.concatenate([mean[None], scale * factor])
        if self._has_remainders:
            matrix = np.concatenate([matrix, matrix - matrix.astype(np.float16)])
        return matrix.astype(np.float32)


def _factor_products(gates: Rows) -> tuple[F64, F64]:
    """The mean [hidden] of ``gates``, and a matrix F [min(n, hidden), hidden] of which the product
    F^T F is that of what is left of them without their mean.

    The Cholesky factor of that product, summed up in float64, takes a small part of the time of a
    QR decomposition, and is no less exact for the length of F u: the error of the product is some
    1e-13 of its norm, and what is stored of F is float32 at best (docs/converting.md).
    """
    blocks = _list_blocks(gates.count)
    shift = gates.read(*blocks[0]).mean(axis=0, dtype=np.float64)
    if gates.count <= len(shift):
        return _factor_rows(gates)
    # About a point near the mean, products lose nothing when the mean is taken off.
    sums = np.zeros(len(shift))
    products = np.zeros((len(shift), len(shift)))
    for block in blocks:
        rows = gates.read(*block) - shift
        sums += rows.sum(axis=0)
        products += rows.T @ rows
    rest = sums / gates.count
    products -= gates.count * np.outer(rest, rest)
    try:
        factor: F64 = np.linalg.cholesky(products).astype(np.float64, copy=False)
        return shift + rest, factor.T
    except np.linalg.LinAlgError:
        # Some input adds nothing to any gate, or the same to all.
        return _factor_rows(gates)


def _factor_rows(gates: Rows) -> tuple[F64, F64]:
    """The same by QR decomposition, whatever the rank."""
    blocks = _list_blocks(gates.count)
    sums = [gates.read(*block).sum(axis=0, dtype=np.float64) for block in blocks]
    mean: F64 = np.sum(sums, axis=0) / gates.count
    factor = np.zeros((0, len(mean)))
    for block in blocks:
        # The triangle of all blocks so far, and the next block, have the triangle of both.
        both = np.concatenate([factor, gates.read(*block) - mean])
        # Types know results with both factors only.
        triangle: Any = np.linalg.qr(both, "r")
        factor = triangle
    return mean, factor


def _list_blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutoffTensor(SourceTensor):
    maker: CutoffMaker

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.maker.make()[start:stop]

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)


def find_cutoff(tensors: Mapping[str, SourceTensor], model: Model, layer: int) -> SourceTensor:
    """The matrix of a layer whose gates have a cutoff."""
    gates, deviations = find_ffn_rows(tensors, model, "gate", layer, 0), model.find_cutoff(layer)
    assert deviations is not None
    rows, _ = list_cutoff_matrices(model)[layer]
    return _CutoffTensor(
        file=gates.tensor.file,
        name=gates.tensor.name,
        dtype="F32",
        shape=(rows, model.shape.hidden),
        offset=0,
        size_bytes=gates.size_bytes,
        maker=CutoffMaker(gates, deviations, has_remainders(model)),
    )
