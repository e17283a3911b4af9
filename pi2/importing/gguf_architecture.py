"""A family as GGUF files know it: what they call its tensors, and how its configuration is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pi2.importing.gguf_decoders import read_decoder
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.gguf_names import DECODER, Names
from pi2.importing.gguf_positions import Scale, scale_llama3
from pi2.importing.safetensors_file import SourceTensor

Read = Callable[[Metadata, dict[str, Any], str], dict[str, Any]]
"""Returns the keys that a family adds to a configuration, which has those of all families; the text
is the activation of its FFNs.  Raises `UserError` P532 as `Metadata.read`."""
Complete = Callable[[dict[str, Any], dict[str, SourceTensor]], None]
"""Adds to a configuration what the tensors of a file tell, which are there by their names in the
original, and may give them others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family as GGUF files know it."""

    model_type: str
    """The family's name in ``config.json``."""
    names: Names = field(default_factory=lambda: DECODER)
    activation: str = "silu"
    """Activation of the models of this family, which their files do not state."""
    permutes: bool = False
    """Whether rows of queries and keys are in the order of pairs that follow each other."""
    norm_offset: float = 0.0
    """Number that the file has added to the weights of norms."""
    tiles_values: bool = False
    """Whether value heads that share a key head are apart (`pi2.importing.gguf_states`)."""
    settings: dict[str, object] = field(default_factory=dict)
    """Further keys of the configuration, which files of this family do not state."""
    read: Read = read_decoder
    """What reads the configuration of this family."""
    complete: Complete | None = None
    """What adds that of it which tensors tell."""
    scale: Scale = scale_llama3
    """What says how divisors of frequencies scale positions."""
