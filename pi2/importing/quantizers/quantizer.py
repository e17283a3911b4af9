"""The quantiser of a conversion: which method, and what is known of the matrices' inputs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from pi2.arrays import F32, U8, Scales
from pi2.diagnostics import UserError
from pi2.importing.quantizers.compensation import prepare_moments, quantize_with_compensation
from pi2.importing.quantizers.errors import ErrorReport
from pi2.importing.quantizers.search import quantize_by_search
from pi2.plan.weights.layout import Precision
from pi2.plan.weights.rounding import dequantize, dequantize_exponents, quantize, quantize_exponents

Method = Literal["nearest", "search", "compensated"]

MOMENTS = "moments"
"""Folder in the statistics of `pi2 activations --moments`."""


def name_moments(layer: int) -> str:
    """File of a layer's second moments E[u u^T] of FFN inputs, float32 [hidden, hidden]."""
    return f"{MOMENTS}/layer-{layer:03d}.npy"


class Quantizer:
    """Quantises rows; thread-safe."""

    def __init__(
        self, method: Method = "nearest", statistics: Path | None = None, *, report: bool = False
    ) -> None:
        """``statistics``: folder of `pi2 activations --moments`, needed by ``compensated``;
        ``report``: keep errors by tensor.  `UserError` P548 if the folder has no moments."""
        self.method: Method = method
        self.errors = ErrorReport() if report else None
        self._statistics = statistics
        self._prepare = lru_cache(maxsize=1)(self._read_moments)
        if statistics is not None and not (statistics / name_moments(0)).is_file():
            raise _explain(statistics, "it has no moments of inputs")
        if method == "compensated" and statistics is None:
            raise UserError.of(
                "P548",
                "the compensated quantiser needs to know the inputs of the matrices",
                help="record them with `pi2 activations PLAN --text FILE -o STATS --moments`, and "
                "give --statistics STATS",
            )

    def describe(self) -> list[object]:
        """What decides the bytes that come out, for the key of a conversion."""
        if self._statistics is None:
            return [self.method]
        files = sorted((self._statistics / MOMENTS).glob("*.npy"))
        return [self.method, *([file.name, file.stat().st_mtime_ns] for file in files)]

    def quantize(
        self, rows: F32, precision: Precision, tensor: str, ffn_layer: int | None = None
    ) -> tuple[U8, Scales | None]:
        """Quantise and pack ``rows`` [n, length] of ``tensor``.

        ``ffn_layer``: the layer whose FFN's input the rows are multiplied with, if they are.
        Raises `ValueError` for weights that cannot be stored, `UserError` P548 for moments of
        another shape.
        """
        packed = self._quantize(rows, precision, ffn_layer)
        if self.errors is not None:
            stored = dequantize(*packed, rows.shape[1], precision)
            self.errors.add(tensor, rows, stored, precision)
        return packed

    def quantize_exponents(self, rows: F32, tensor: str, *, spread: bool) -> tuple[U8, U8]:
        """Quantise and pack ``rows`` [n, length] of ``tensor`` as mxfp4, to nearest whatever the
        method; every 32 of them share exponents where these are ``spread``.

        Raises `ValueError` for weights that cannot be stored.
        """
        packed = quantize_exponents(rows, spread=spread)
        if self.errors is not None:
            stored = dequantize_exponents(*packed, rows.shape[1], spread=spread)
            self.errors.add(tensor, rows, stored, "mxfp4")
        return packed

    def _quantize(
        self, rows: F32, precision: Precision, ffn_layer: int | None
    ) -> tuple[U8, Scales | None]:
        if self.method == "nearest" or precision != "int4" or not np.isfinite(rows).all():
            return quantize(rows, precision)
        if self._statistics is None or ffn_layer is None:
            return quantize_by_search(rows, precision)
        importance, factor = self._prepare(ffn_layer, rows.shape[1])
        if self.method == "search" or factor is None:
            return quantize_by_search(rows, precision, importance)
        return quantize_with_compensation(rows, factor, importance)

    def _read_moments(self, layer: int, length: int) -> tuple[F32, F32 | None]:
        assert self._statistics is not None
        try:
            moments = np.load(self._statistics / name_moments(layer), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _explain(self._statistics, str(error)) from None
        if moments.shape != (length, length) or not np.isfinite(moments).all():
            raise _explain(self._statistics, f"layer {layer} is of another model")
        importance = np.ascontiguousarray(np.diag(moments), np.float32)
        factor = prepare_moments(moments) if self.method == "compensated" else None
        return importance, factor


def _explain(statistics: Path, problem: str) -> UserError:
    return UserError.of(
        "P548",
        f"{statistics} does not have the inputs of this model's matrices: {problem}",
        help="record them with `pi2 activations PLAN --text FILE -o STATS --moments`",
    )
