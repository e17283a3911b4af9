"""Rounding with the best scale: tries several for every group and keeps the one that errs least.

`pi2.plan.packing.quantize` takes the scale from the largest weight of a group.  A smaller scale
cuts that weight off and keeps the others better; a least-squares fit of the scale to the codes
follows.  Errors count as much as the inputs that they meet: by their mean squares, where known
(activation-aware, as in AWQ and in llama.cpp's importance matrices), else alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pi2.plan.layout import GROUP, Precision
from pi2.plan.packing import pack_codes, quantize

U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]

BOTTOM, TOP = -8, 7
"""Codes of int4."""
_FACTORS = np.linspace(0.68, 1.0, 9, dtype=np.float32)
"""Scales that are tried, as shares of the one that the largest weight asks for."""


def quantize_by_search(
    rows: F32, precision: Precision, importance: F32 | None = None
) -> tuple[U8, F16 | None]:
    """Quantise and pack ``rows`` float32 [n, length] like `pi2.plan.packing.quantize`.

    ``importance`` float32 [length]: what squared errors of each column weigh.  Only int4 gains;
    other types are rounded to nearest.  Raises `ValueError` for weights that cannot be stored.
    """
    if precision != "int4":
        return quantize(rows, precision)
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    weights = None if importance is None else importance.reshape(length // GROUP, GROUP)
    scales = find_scales(groups, weights)
    if not np.isfinite(scales).all():
        quantize(rows, precision)  # says what is wrong
    codes = round_groups(groups, scales).reshape(count, length)
    return pack_codes(codes, "int4"), scales


def find_scales(groups: F32, importance: F32 | None) -> F16:
    """Best scales float16 [n, g] for ``groups`` [n, g, 32]; ``importance`` [g, 32]."""
    peaks = np.abs(groups).max(axis=-1) / np.float32(TOP)
    with np.errstate(over="ignore", invalid="ignore"):
        best = peaks.astype(np.float16)
        errors = _measure(groups, best, importance)
        for factor in _FACTORS[:-1]:
            errors = _keep_better(groups, (peaks * factor).astype(np.float16), best, errors,
                                  importance)  # fmt: skip
        codes = round_groups(groups, best).astype(np.float32)
        weighted = codes if importance is None else codes * importance
        size = (weighted * codes).sum(axis=-1)
        fitted = (weighted * groups).sum(axis=-1) / np.where(size > 0, size, 1)
        _keep_better(groups, fitted.astype(np.float16), best, errors, importance)
    return np.asarray(best, np.float16)


def round_groups(groups: F32, scales: F16) -> I8:
    """Nearest codes int8 [n, g, 32]; a scale of 0 stands for zeros."""
    wide = scales.astype(np.float32)[..., None]
    codes = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
    return np.clip(np.rint(codes), BOTTOM, TOP).astype(np.int8)


def _keep_better(groups: F32, scales: F16, best: F16, errors: F32, importance: F32 | None) -> F32:
    """Put ``scales`` into ``best`` where they err less; returns the errors of ``best``."""
    found = _measure(groups, scales, importance)
    better = (found < errors) & (scales > 0)
    best[better] = scales[better]
    return np.where(better, found, errors)


def _measure(groups: F32, scales: F16, importance: F32 | None) -> F32:
    """Squared errors [n, g] of groups at their nearest codes."""
    wrong = round_groups(groups, scales) * scales.astype(np.float32)[..., None] - groups
    np.square(wrong, out=wrong)
    if importance is not None:
        wrong *= importance
    return np.asarray(wrong.sum(axis=-1))
