"""nanochat."""

from __future__ import annotations

from pi2.importing.config import Config
from pi2.importing.families.decoders import LAYER, Tables
from pi2.importing.families.llama import describe_llama


def describe_nanochat(config: Config) -> Tables:
    """Norms without weights, of embeddings and turned heads too, and the square of ReLU without
    gates."""
    config = config.set_default("hidden_act", "relu2").change({"mlp_bias": False})
    tables = describe_llama(config)
    tables["norm"] |= {"weights": False, "embedding": True}
    tables["rope"]["pairs"] = "swapped"
    tables["attention"] |= {
        "head_norm": True,
        "head_norm_weights": False,
        "head_norm_place": "after",
    }
    tables["ffn"]["gated"] = False
    cap = config.read_limit("final_logit_softcapping", 15.0)
    if cap is not None:
        tables["logit_softcap"] = cap
    tables["tensors"] = {
        "up": f"{LAYER}.mlp.fc1.weight",
        "down": f"{LAYER}.mlp.fc2.weight",
    }
    return tables


FAMILIES = {"nanochat": describe_nanochat}
