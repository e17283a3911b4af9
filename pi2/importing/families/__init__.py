"""Model documents of the families that `pi2 model new` knows, from their ``config.json``."""

from __future__ import annotations

import difflib
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Mapping

from pi2.diagnostics import UserError
from pi2.importing.config import UNSTATED, Config
from pi2.importing.families.decoders import Tables

_LAYERS = ("num_hidden_layers", "n_layer")
_LIMITS = {
    **dict.fromkeys(_LAYERS, 1024),
    "hidden_size": 2**20,
    "max_position_embeddings": 2**40,
}
"""No model document states more; families may count through layers, and take roots of sizes."""

_SAME_LETTERS = 4
"""Letters with which similar names begin: a version or a kind of FFN comes after a family's."""
_SIMILAR = 0.7
"""Likeness of similar names that begin otherwise."""

Describe = Callable[[Config], Tables]
"""Describes a family: raises `UserError` P544 for options that no model document can state."""


def load_families() -> dict[str, Describe]:
    """Descriptions by ``model_type``, of all modules of this folder."""
    found: dict[str, Describe] = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        own: Mapping[str, Describe] = getattr(module, "FAMILIES", {})
        assert not found.keys() & own.keys(), f"{entry.name} describes a family a second time"
        found |= own
    return dict(sorted(found.items()))


FAMILIES: Mapping[str, Describe] = load_families()
"""Descriptions of families by ``model_type``."""


def find_nearest(kind: str) -> str:
    """Say which known family has the most similar name, as the end of a sentence: its description
    is the one to begin with.  Nothing if none is similar."""

    def rate(name: str) -> tuple[int, float]:
        equal = (ours == theirs for ours, theirs in zip(kind, name, strict=False))
        same = sum(1 for _ in itertools.takewhile(bool, equal))
        return same, difflib.SequenceMatcher(None, kind, name).ratio()

    nearest = max(FAMILIES, key=rate)
    same, ratio = rate(nearest)
    if same < _SAME_LETTERS and ratio < _SIMILAR:
        return ""
    return (
        f"; the nearest known one is {nearest!r}: where the code differs in names and sizes alone, "
        f"`pi2 model new` of a copy whose config.json says {nearest!r} is a document to begin with"
    )


BASES = {
    "bitnet": 500_000.0,
    "cohere": 500_000.0,
    "cwm": 1_000_000.0,
    "ernie4_5": 500_000.0,
    "ernie4_5_moe": 500_000.0,
    "flex_olmo": 500_000.0,
    "gpt_oss": 150_000.0,
    "helium": 100_000.0,
    "hy_v3": 11_158_840.0,
    "minimax_m2": 5_000_000.0,
    "minimax_m3_vl_text": 5_000_000.0,
    "mixtral": 1_000_000.0,
    "phimoe": 1_000_000.0,
    "smollm3": 2_000_000.0,
    "solar_open": 1_000_000.0,
}
"""Base of rotary positions where a configuration states none, of families that have not 10,000 (or
say it where they are described)."""


def describe_family(config: Config) -> Tables:
    """Tables of the model document; `UserError` P544 if the family or an option is unknown."""
    kind = config.read("model_type", str)
    family = FAMILIES.get(kind)
    if kind in UNSTATED:
        raise UserError.of(
            "P544",
            f"{config.file} is of the family {kind!r}, which has what no model document states: "
            f"{UNSTATED[kind]}",
            help="docs/howto/add-a-model.md lists the families that are known",
            file=str(config.file),
        )
    if family is None:
        raise config.refuse(f"the family {kind!r} (model_type) is unknown{find_nearest(kind)}")
    for key, most in _LIMITS.items():
        if config.has(key) and not 1 <= config.read(key, int) <= most:
            raise config.refuse(f"{key} is {config.read(key, int)}, not in 1..{most}")
    return family(config.set_default("rope_theta", BASES[kind]) if kind in BASES else config)
