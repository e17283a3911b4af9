"""Arithmetic in numpy that several backends share: RoPE, chosen experts, parts of tensors."""

import math
from dataclasses import replace

import numpy as np

from pi2.arrays import F32, F64, I32
from pi2.model.blocks import Attention
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from pi2.plan.weights.layout import Tensor


def read_rows(tensor: Tensor) -> F32:
    """Rows of a tensor of float32 [rows, length]."""
    return np.asarray(tensor.weights).view(np.float32).reshape(-1, tensor.length)


def list_chosen(routes: F32) -> I32:
    """Experts, ascending, that compute a token, from its weights float32 [experts]."""
    # `flatnonzero` is three functions of Python.
    return routes.nonzero()[0].astype(np.int32)


def slice_tensor(tensor: Tensor, part: int, parts: int) -> Tensor:
    """Rows of part ``part`` of ``parts`` equal ones; a tensor of one row is cut in its length."""
    if parts == 1:
        # Whole, also where one row is packed into another number of elements.
        return tensor
    if tensor.rows == 1:
        size = tensor.length // parts
        values = tensor.weights[:, part * size : (part + 1) * size]
        return replace(tensor, length=size, weights=values)
    size = tensor.rows // parts
    rows = slice(part * size, (part + 1) * size)
    scales = None if tensor.scales is None else tensor.scales[rows]
    return replace(tensor, rows=size, weights=tensor.weights[rows], scales=scales)


def compute_frequencies(rope: Rope, head_dim: int, *, is_long: bool = False) -> F64:
    """Angular frequencies [head_dim / 2] in radians per token, rotated pairs first.

    ``linear`` divides all by the factor; ``llama3`` divides the long wavelengths, keeps the short
    ones, and blends between (the rule that Llama 3.1 published with its configuration); ``yarn``
    blends by the number of rotations within the original context (arXiv 2309.00071, section 3.2);
    ``longrope`` divides each by its own number, another if ``is_long`` (arXiv 2402.13753);
    ``proportional`` divides all by the factor, and leaves the last pairs as they are."""
    rotated = rope.count_rotated(head_dim)
    frequencies = np.zeros(head_dim // 2)
    if rotated:
        plain = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        frequencies[: rotated // 2] = _scale(rope, plain, rotated, is_long)
    return frequencies


class RopeTables:
    """Cosines and sines [context, head_dim / 2] in fixed arrays; ``longrope`` takes the length
    after the call, as transformers does."""

    def __init__(self, rope: Rope, head_dim: int, arrays: tuple[F32, F32]) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._is_long = False
        self.arrays = arrays
        self._fill()

    def expect(self, end: int) -> bool:
        """Prepare for calls that bring the sequence to ``end`` tokens; return whether that changes
        the arrays."""
        is_changed = self._rope.is_long(end) != self._is_long
        if is_changed:
            self._is_long = not self._is_long
            self._fill()
        return is_changed

    def _fill(self) -> None:
        context = len(self.arrays[0])
        tables = compute_rope_tables(self._rope, self._head_dim, context, is_long=self._is_long)
        for array, table in zip(self.arrays, tables, strict=True):
            array[:] = table


def compute_rope_tables(
    rope: Rope, head_dim: int, context: int, *, is_long: bool = False
) -> tuple[F32, F32]:
    """Cosines and sines [context, head_dim / 2], float32."""
    angles = np.outer(np.arange(context), compute_frequencies(rope, head_dim, is_long=is_long))
    cosines, sines = np.cos(angles), np.sin(angles)
    factor = _find_factor(rope, is_long)
    if factor != 1.0:
        pairs = rope.count_rotated(head_dim) // 2
        cosines[:, :pairs] *= factor
        sines[:, :pairs] *= factor
    return cosines.astype(np.float32), sines.astype(np.float32)


def _find_factor(rope: Rope, is_long: bool) -> float:
    if is_long and rope.long_attention_factor is not None:
        return rope.long_attention_factor
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        return 0.1 * math.log(rope.factor) + 1.0
    if rope.kind == "longrope":
        return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_context))
    return 1.0


def list_slopes(shape: Attention) -> list[float]:
    """Falls of scores with every token of distance, by heads; none if scores do not fall."""
    alibi, heads = shape.options.alibi, shape.heads
    if alibi is None:
        return []
    whole = 1 << (heads.bit_length() - 1)
    odd = range(1, 2 * (heads - whole), 2)
    shares = [*(head / whole for head in range(1, whole + 1)), *(own / whole / 2 for own in odd)]
    return [2.0 ** (-alibi * share) for share in shares]


def compute_growth(model: Model, layer: int, first: int, end: int) -> F32:
    """Factors float32 [end - first] of queries of ``layer`` at positions from ``first`` on, which
    grow with every interval; 1 in layers where they do not."""
    own = model.blocks[layer].attention
    if own is None or own.options.growth == 0.0:
        return np.ones(end - first, np.float32)
    interval = own.options.growth_interval or model.rope.original_context
    turns = np.floor((np.arange(first, end) + own.options.growth_offset) / interval)
    return (1 + own.options.growth * np.log1p(turns)).astype(np.float32)


def _scale(rope: Rope, frequencies: F64, rotated: int, is_long: bool) -> F64:
    """Frequencies [rotated / 2] with the scaling of ``rope``."""
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        turning = np.arange(rotated // 2) < int(rope.share * rotated / 2)
        return frequencies * turning / rope.factor
    if rope.kind == "longrope":
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / np.asarray(factors, np.float64)
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        turns = rope.original_context / wavelengths
        # Where both are the same, as in Llama 4, nothing is between them.
        width = (high - low) or math.ulp(low)
        kept = np.clip((turns - low) / width, 0.0, 1.0)
    elif rope.kind == "yarn":
        first = _find_pair(rope, rope.fast_rotations, rotated)
        last = _find_pair(rope, rope.slow_rotations, rotated)
        if rope.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        # The published code widens an empty range, so as not to divide by zero.
        width = (last - first) or 0.001
        kept = 1 - np.clip((np.arange(rotated // 2) - first) / width, 0.0, 1.0)
    else:
        return frequencies
    return np.asarray((1 - kept) * frequencies / rope.factor + kept * frequencies)


def _find_pair(rope: Rope, rotations: float, rotated: int) -> float:
    """Number of the pair that turns ``rotations`` times within the original context."""
    turns = rope.original_context / (rotations * 2 * math.pi)
    return rotated * math.log(turns) / (2 * math.log(rope.theta))
