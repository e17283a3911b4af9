"""Tables of rotary position embeddings, shared by the backends."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pi2.plan.model import Rope


def compute_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float64]:
    """Angular frequencies [head_dim / 2] in radians per token.

    ``linear`` divides all by the factor; ``llama3`` divides the long wavelengths, keeps the short
    ones, and blends between (the rule that Llama 3.1 published with its configuration).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        return np.asarray(frequencies / rope.factor)
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        smooth = np.clip((rope.original_context / wavelengths - low) / (high - low), 0.0, 1.0)
        return np.asarray((1 - smooth) * frequencies / rope.factor + smooth * frequencies)
    return np.asarray(frequencies)


def compute_rope_tables(
    rope: Rope, head_dim: int, context: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines [context, head_dim / 2], float32."""
    angles = np.outer(np.arange(context), compute_frequencies(rope, head_dim))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
