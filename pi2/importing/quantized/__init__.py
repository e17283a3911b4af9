"""Hugging Face checkpoints whose weights are quantised: shown as the plain tensors that they stand
for.

A module of this folder reads some methods (``quantization_config.quant_method``) and states them in
``METHODS``; it is found by being here."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import DecodedTensor
from pi2.importing.safetensors_file import SourceTensor

Tensors = dict[str, SourceTensor]
Read = Callable[[Config, Mapping[str, SourceTensor]], Tensors]
"""Gives tensors with weights that are decoded as they are read, by the names of plain weights."""


def load_methods() -> dict[str, Read]:
    found: dict[str, Read] = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        found |= getattr(module, "METHODS", {})
    return dict(sorted(found.items()))


def decode_weights(
    file: Path, settings: Mapping[str, Any], tensors: Mapping[str, SourceTensor]
) -> Mapping[str, SourceTensor]:
    """Tensors as in a plain checkpoint, by what ``file`` says of quantised weights, if anything;
    `UserError` P533 to P535, P544 for unknown methods."""
    if not settings:
        return tensors
    own = Config(file, settings)
    # Some say how, and leave the name of the method out.
    method = own.read("quant_method", str, "fp8" if own.has("weight_block_size") else "")
    methods = load_methods()
    if method not in methods:
        raise UserError.of(
            "P544",
            f"{file} says that the weights are quantised by {method!r}, which pi2 does not read",
            help=f"take a checkpoint of another kind: plain, or {', '.join(methods)}",
            file=str(file),
        )
    decoded = methods[method](own, tensors)
    made = {name: item for name, item in decoded.items() if isinstance(item, DecodedTensor)}
    parts = {part.name for item in made.values() for part in item.parts}
    return {name: item for name, item in decoded.items() if name in made or name not in parts}


def find_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of quantised weights; nothing if they are plain."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, Mapping) and found:
                return found
    return {}
