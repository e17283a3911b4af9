"""Youtu."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import Tables
from pi2.importing.families.deepseek import describe_latent


def describe_youtu(config: Config) -> Tables:
    """Youtu: DeepSeek V3 without experts."""
    tables = describe_latent(config)
    if config.read("rope_interleave", bool, True):
        tables["rope"]["pairs"] = "neighbours"
    tables["tied_head"] = config.read("tie_word_embeddings", bool, True)
    return tables


FAMILIES = {"youtu": describe_youtu}
