"""Model documents of the families that `pi2 model new` knows, from their ``config.json``.

A family is a function from the configuration to the tables of a model document; what it leaves
out has the document's default.  Names of tensors are those of the checkpoints on the hub.
"""

from __future__ import annotations

from collections.abc import Callable

from pi2.importing.config import Config
from pi2.importing.families import decoders, gemma, mixtures, plain
from pi2.importing.families.decoders import Tables

_LAYERS = ("num_hidden_layers", "n_layer")
_LIMITS = {
    **dict.fromkeys(_LAYERS, 1024),
    "hidden_size": 2**20,
    "max_position_embeddings": 2**40,
}
"""No model document states more; families may count through layers, and take roots of sizes."""

FAMILIES: dict[str, Callable[[Config], Tables]] = {
    "bamboo": decoders.describe_bamboo,
    "cohere": decoders.describe_cohere,
    "cohere2": decoders.describe_cohere2,
    "falcon": plain.describe_falcon,
    "gemma": gemma.describe_gemma,
    "gemma2": gemma.describe_gemma2,
    "gemma3_text": gemma.describe_gemma3,
    "glm": decoders.describe_glm,
    "glm4": decoders.describe_glm4,
    "gpt_neox": plain.describe_gpt_neox,
    "gptj": plain.describe_gptj,
    "granite": decoders.describe_granite,
    "llama": decoders.describe_llama,
    "mistral": decoders.describe_mistral,
    "mixtral": mixtures.describe_mixtral,
    "opt": plain.describe_opt,
    "phi": plain.describe_phi,
    "phi3": decoders.describe_phi3,
    "qwen2": decoders.describe_qwen2,
    "qwen2_moe": mixtures.describe_qwen2_moe,
    "qwen3": decoders.describe_qwen3,
    "qwen3_moe": mixtures.describe_qwen3_moe,
    "smallthinker": mixtures.describe_smallthinker,
    "smollm3": decoders.describe_smollm3,
    "sparsellama": decoders.describe_llama,
    "stablelm": decoders.describe_stablelm,
    "starcoder2": plain.describe_starcoder2,
    "turbosparsemixtral": mixtures.describe_turbosparse_mixtral,
}
"""Descriptions of families by ``model_type``."""


def describe_family(config: Config) -> Tables:
    """Tables of the model document; `UserError` P544 if the family or an option is unknown."""
    kind = config.read("model_type", str)
    family = FAMILIES.get(kind)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise config.refuse(f"the family {kind!r} is unknown (known: {known})")
    for key, most in _LIMITS.items():
        if config.has(key) and not 1 <= config.read(key, int) <= most:
            raise config.refuse(f"{key} is {config.read(key, int)}, not in 1..{most}")
    return family(config)
