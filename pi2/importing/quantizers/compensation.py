"""Rounding that makes up for its own errors: what a column loses, later columns give back.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
(2022): with H = E[u u^T] over the inputs u of a matrix, the columns are rounded one after the
other, and the error of each is spread over those still to come so that the matrix's output on such
inputs changes least.  The scale of a group of 32 columns is searched when its turn comes.
"""

from __future__ import annotations

import numpy as np

from pi2.arrays import F16, F32, U8
from pi2.importing.quantizers.search import BOTTOM, TOP, find_scales
from pi2.plan.weights.codes import pack_codes
from pi2.plan.weights.layout import GROUP

DAMPING = 0.01
"""Share of the diagonal's mean that is added to the diagonal: inputs that hardly vary would be
trusted too much without it."""


def prepare_moments(moments: F32) -> F32:
    """Upper triangular factor U [length, length] with U^T U = H^-1, from H [length, length]."""
    exact = moments.astype(np.float64)
    mean = float(np.diag(exact).mean())
    exact[np.diag_indices_from(exact)] += DAMPING * mean if mean > 0 else 1.0
    inverse = np.linalg.inv(exact)
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    return np.ascontiguousarray(factor, np.float32)


def quantize_with_compensation(rows: F32, factor: F32, importance: F32) -> tuple[U8, F16]:
    """Quantise and pack ``rows`` float32 [n, length] as int4.

    ``factor`` [length, length] is that of `prepare_moments`, ``importance`` [length] the mean
    squares of the inputs.  Raises `ValueError` if a weight is not finite or too large.
    """
    count, length = rows.shape
    rest = rows.copy()
    codes = np.empty((count, length), np.int8)
    scales = np.empty((count, length // GROUP), np.float16)
    for group in range(length // GROUP):
        first, end = group * GROUP, (group + 1) * GROUP
        block = rest[:, first:end]
        own = find_scales(block[:, None], importance[None, first:end])[:, 0]
        if not np.isfinite(own).all() or not np.isfinite(block).all():
            raise ValueError("a weight is not a finite number or does not fit into fp16")
        scales[:, group] = own
        wide = own.astype(np.float32)
        reciprocal = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
        errors = np.empty((count, GROUP), np.float32)
        for place in range(GROUP):
            column = first + place
            code = np.clip(np.rint(block[:, place] * reciprocal), BOTTOM, TOP)
            codes[:, column] = code
            error = (block[:, place] - code * wide) / factor[column, column]
            errors[:, place] = error
            block[:, place + 1 :] -= error[:, None] * factor[column, column + 1 : end]
        rest[:, end:] -= errors @ factor[first:end, end:]
    return pack_codes(codes, "int4"), scales
