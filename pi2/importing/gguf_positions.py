"""The scaling of positions that GGUF files have as tensors, under the names of configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.gguf_config import recover_llama3
from pi2.importing.gguf_gemma4 import find_turned_share
from pi2.importing.gguf_metadata import Metadata

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def scale_positions(
    config: dict[str, Any], metadata: Metadata, read: Callable[[str], F32 | None]
) -> None:
    """State it in ``config``; ``read`` gives a tensor of the file [pairs], None where it has none.
    Raises `UserError` P544 where the scaling is unknown, P532 as `Metadata.read`."""
    divisors = read(_FREQUENCIES)
    if divisors is not None and not _scale_frequencies(config, divisors):
        raise _refuse(metadata.file, _FREQUENCIES)
    long, short = read(_LONG), read(_SHORT)
    if long is None and short is None:
        return
    if long is None or short is None or config["model_type"] not in ("phi3", "phimoe"):
        raise _refuse(metadata.file, _SHORT if long is None else _LONG)
    context = metadata.read_count("{arch}.rope.scaling.original_context_length")
    factor = "{arch}.rope.scaling.attn_factor"
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": context,
        # Files have 32 bits of what people wrote in decimals.
        "long_factor": [float(str(number)) for number in long],
        "short_factor": [float(str(number)) for number in short],
    }
    if metadata.has(factor):
        scaling["attention_factor"] = metadata.read(factor, float)
    config |= {"rope_scaling": scaling, "original_max_position_embeddings": context}


def _scale_frequencies(config: dict[str, Any], divisors: F32) -> bool:
    """State what divisors of frequencies say; whether it is known."""
    if config["model_type"] == "gemma4_text":
        share = find_turned_share(divisors)
        config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = share
        return share is not None
    theta, size = config.get("rope_theta", 10000.0), config.get("head_dim", 1)
    scaling = recover_llama3(divisors, theta, size)
    if scaling:
        config["rope_scaling"] = scaling
    return scaling is not None


def _refuse(file: Path, name: str) -> UserError:
    return UserError.of(
        "P544",
        f"tensor {name!r} in {file} scales positions in a way that is unknown",
        help="convert the original checkpoint",
        file=str(file),
    )
