"""Rounding with the best scale: tries several for every group and keeps the one that errs least.

`pi2.plan.weights.rounding.quantize` takes the scale from the largest weight of a group.  A smaller
scale cuts that weight off and keeps the others better; a least-squares fit of the scale to the
codes follows.  Errors count as much as the inputs that they meet: by their mean squares, where
known (activation-aware, as in AWQ and in llama.cpp's importance matrices), else alike.
"""

from __future__ import annotations

import numpy as np

from pi2.arrays import F16, F32, I8, U8, Scales
from pi2.plan.weights.codes import pack_codes
from pi2.plan.weights.layout import GROUP, Precision
from pi2.plan.weights.rounding import quantize

BOTTOM, TOP = -8, 7
"""Codes of int4."""
_FACTORS = np.linspace(0.68, 1.0, 9, dtype=np.float32)
"""Scales that are tried, as shares of the one that the largest weight asks for."""
_TILE_WEIGHTS = 2**15
"""Weights that are tried together: they stay in a core's cache."""


def quantize_by_search(
    rows: F32, precision: Precision, importance: F32 | None = None
) -> tuple[U8, Scales | None]:
    """Quantise and pack ``rows`` float32 [n, length] like `pi2.plan.weights.rounding.quantize`.

    ``importance`` float32 [length]: what squared errors of each column weigh.  Only int4 gains;
    other types are rounded to nearest.  Raises `ValueError` for weights that cannot be stored.
    """
    if precision != "int4":
        return quantize(rows, precision)
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    weights = None if importance is None else importance.reshape(length // GROUP, GROUP)
    scales = np.empty((count, length // GROUP), np.float16)
    step = max(1, _TILE_WEIGHTS // length)
    for start in range(0, count, step):
        scales[start : start + step] = find_scales(groups[start : start + step], weights)
    if not np.isfinite(scales).all():
        quantize(rows, precision)  # says what is wrong
    codes = round_groups(groups, scales).reshape(count, length)
    return pack_codes(codes, "int4"), scales


def find_scales(groups: F32, importance: F32 | None) -> F16:
    """Best scales float16 [n, g] for ``groups`` [n, g, 32]; ``importance`` [g, 32]."""
    count, per_row, length = groups.shape
    # One group a column: numpy works along rows, and those of a group would be short.
    columns = np.ascontiguousarray(groups.reshape(-1, length).T)
    weights = None if importance is None else np.tile(importance.T, (1, count))
    with np.errstate(over="ignore", invalid="ignore"):
        peaks = np.abs(columns).max(axis=0) / np.float32(TOP)
        best = peaks.astype(np.float16)
        errors = _measure(columns, best, weights)
        for factor in _FACTORS[:-1]:
            scales = (peaks * factor).astype(np.float16)
            errors = _keep_better(columns, scales, best, errors, weights)
        codes = _round(_divide(columns, best))
        weighted = codes if weights is None else codes * weights
        size = (weighted * codes).sum(axis=0)
        fitted = (weighted * columns).sum(axis=0) / np.where(size > 0, size, 1)
        _keep_better(columns, fitted.astype(np.float16), best, errors, weights)
    return np.asarray(best.reshape(count, per_row), np.float16)


def round_groups(groups: F32, scales: F16) -> I8:
    """Nearest codes int8 [n, g, 32]; a scale of 0 stands for zeros."""
    wide = scales.astype(np.float32)[..., None]
    codes = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
    return np.clip(np.rint(codes), BOTTOM, TOP).astype(np.int8)


def _keep_better(columns: F32, scales: F16, best: F16, errors: F32, weights: F32 | None) -> F32:
    """Put ``scales`` [n] into ``best`` where they err less; returns the errors of ``best``."""
    found = _measure(columns, scales, weights)
    better = (found < errors) & (scales > 0)
    best[better] = scales[better]
    return np.where(better, found, errors)


def _measure(columns: F32, scales: F16, weights: F32 | None) -> F32:
    """Squared errors [n] of groups [32, n] at their nearest codes."""
    exact = _divide(columns, scales)
    wrong = _round(exact)
    wrong -= exact
    np.square(wrong, out=wrong)
    unit = np.square(scales.astype(np.float32))
    zero = scales == 0
    if zero.any():
        # Groups that become zeros.
        wrong[:, zero], unit[zero] = np.square(columns[:, zero]), 1
    if weights is not None:
        wrong *= weights
    return np.asarray(wrong.sum(axis=0) * unit)


def _divide(columns: F32, scales: F16) -> F32:
    """Weights in units of their scales; 0 where that is 0."""
    wide = scales.astype(np.float32)
    return columns * np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def _round(exact: F32) -> F32:
    codes = np.rint(exact)
    np.maximum(codes, BOTTOM, out=codes)
    np.minimum(codes, TOP, out=codes)
    return codes
