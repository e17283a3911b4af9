"""How tokens are drawn by default: what a checkpoint's ``generation_config.json`` says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pi2.importing.checkpoint import Checkpoint
from pi2.plan.documents.sampling import Sampling

FILE = "generation_config.json"
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""What metadata of GGUF files calls them."""


def read_sampling(checkpoint: Checkpoint) -> Sampling | None:
    """The sampling that the checkpoint's authors recommend; None where they recommend none, or say
    it in a way that no plan can.

    A temperature and its like do not count where ``do_sample`` is false.  Where it is absent they
    do, as in vLLM, if the temperature is among them.
    """
    content = checkpoint.read_file(FILE)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    is_drawn = found.get("do_sample")
    if is_drawn is not True and (is_drawn is not None or found.get("temperature") is None):
        return None
    given: dict[str, Any] = {"temperature": 1.0}
    given |= {key: found[key] for key in _KEYS if found.get(key) is not None}
    for key in given:
        if key != "top_k" and type(given[key]) is int:
            given[key] = float(given[key])
    if given.get("top_k") == -1:
        given["top_k"] = 0  # how some write that all tokens count
    try:
        return Sampling.model_validate(given)
    except ValidationError:
        return None


def make_generation_config(metadata: Mapping[str, Any]) -> bytes | None:
    """``generation_config.json`` of a GGUF file's metadata; None if they recommend nothing."""
    given = {name: metadata[key] for key, name in _OF_GGUF.items() if key in metadata}
    # Numbers of single precision have more digits than people have written.
    rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in given.items()}
    return json.dumps({"do_sample": True, **rounded}).encode() if rounded else None
