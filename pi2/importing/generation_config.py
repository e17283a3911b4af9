"""How tokens are drawn by default: what a checkpoint's ``generation_config.json`` says."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from pi2.importing.checkpoint import Checkpoint
from pi2.plan.documents.plan import Sampling
from pi2.plan.toml.text import write_value

FILE = "generation_config.json"
_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling(checkpoint: Checkpoint) -> Sampling | None:
    """The sampling that the checkpoint's authors recommend; None where they recommend none, or say
    it in a way that no plan can.

    As in transformers, a temperature and its like count where ``do_sample`` is true.
    """
    content = checkpoint.read_file(FILE)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("do_sample") is not True:
        return None
    given: dict[str, Any] = {"temperature": 1.0}
    given |= {key: found[key] for key in _KEYS if found.get(key) is not None}
    for key in given:
        if key != "top_k" and type(given[key]) is int:
            given[key] = float(given[key])
    try:
        return Sampling.model_validate(given)
    except ValidationError:
        return None


def write_sampling(sampling: Sampling) -> str:
    """Table ``sampling`` of a plan."""
    lines = ["", "[sampling]  # as the checkpoint's generation_config.json says"]
    for key, value in sampling.model_dump(exclude_unset=True).items():
        lines.append(f"{key} = {write_value(value)}")
    return "\n".join(lines) + "\n"
