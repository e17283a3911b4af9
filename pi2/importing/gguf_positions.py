"""The scaling of positions that GGUF files have as tensors, under the names of configurations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.config import TURN_FACTOR
from pi2.importing.gguf_metadata import Metadata

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
POSITIONS = (_FREQUENCIES, _LONG, _SHORT)
"""Tensors that `scale_positions` reads."""


Scale = Callable[[dict[str, Any], F32], bool]
"""States in a configuration what divisors of frequencies [pairs] say; whether that is known."""


def scale_positions(
    config: dict[str, Any],
    metadata: Metadata,
    scale: Scale,
    read: Callable[[str], F32 | None],
) -> None:
    """State it in ``config``; ``scale`` is that of the family, ``read`` gives a tensor of the file
    [pairs], None where it has none.

    Raises `UserError` P544 where the scaling is unknown, P532 as `Metadata.read`.
    """
    divisors = read(_FREQUENCIES)
    if divisors is not None and not scale(config, divisors):
        raise _refuse(metadata.file, _FREQUENCIES)
    long, short = read(_LONG), read(_SHORT)
    if long is None and short is None:
        return
    if long is None or short is None or config["model_type"] not in ("phi3", "phimoe"):
        raise _refuse(metadata.file, _SHORT if long is None else _LONG)
    context = metadata.read_count("{arch}.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": context,
        # Files have 32 bits of what people wrote in decimals.
        "long_factor": [float(str(number)) for number in long],
        "short_factor": [float(str(number)) for number in short],
    }
    if metadata.has("{arch}.rope.scaling.attn_factor"):
        # It is all that they are multiplied by.
        scaling["attention_factor"] = config.pop(TURN_FACTOR)
    config |= {"rope_scaling": scaling, "original_max_position_embeddings": context}


def scale_llama3(config: dict[str, Any], divisors: F32) -> bool:
    """State the llama3 scaling; whether it is one."""
    theta, size = config.get("rope_theta", 10000.0), config.get("head_dim", 1)
    scaling = _recover_llama3(divisors, theta, size)
    if scaling:
        config["rope_scaling"] = scaling
    return scaling is not None


def _recover_llama3(factors: F32, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling whose frequency divisors are ``factors`` [head_dim / 2].

    Files have these numbers (``rope_freqs.weight``) instead of what they were computed from.  {}
    where nothing is scaled; None if no such scaling is known.
    """
    if (factors == 1.0).all():
        return {}
    if theta <= 1.0 or not (np.isfinite(factors) & (factors >= 1.0)).all():
        return None
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) * 2 / head_dim)
    low = 1.0
    # Llama 4 has nothing between the two.
    for original, high in product((2**power for power in range(4, 20)), (4.0, 1.0)):
        turns = original / wavelengths
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= low
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _refuse(file: Path, name: str) -> UserError:
    return UserError.of(
        "P544",
        f"tensor {name!r} in {file} scales positions in a way that is unknown",
        help="convert the original checkpoint",
        file=str(file),
    )
