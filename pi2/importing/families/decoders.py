"""What descriptions of decoders are made of: sizes, norms, FFNs, rotary positions, windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pi2.importing.config import Config, read_activation, read_rope, scale_rope

Tables = dict[str, Any]

LAYER = "model.layers.{layer}"


def describe_decoder(config: Config, rotated: float | None = None) -> Tables:
    """What Llama's descendants share: RMSNorm, gated FFN, rotary positions.

    ``rotated`` is the part of a head that is rotated where the configuration states none; None
    where it is the whole, whatever that says.
    """
    layers = config.read("num_hidden_layers", int)
    hidden, heads = config.read("hidden_size", int), config.read("num_attention_heads", int)
    if heads < 1 or (hidden % heads and not config.has("head_dim")):
        raise config.refuse(f"hidden_size {hidden} is not divided by {heads} heads")
    head_dim = config.read("head_dim", int, hidden // heads)
    context = config.read("max_position_embeddings", int)
    activation = read_activation(config, "hidden_act", "hidden_activation")
    ffn: Tables = {"activation": activation}
    if activation == "fatrelu":
        ffn["threshold"] = config.read("hidden_act_param", float)
    return {
        "shape": {
            "layers": layers,
            "hidden": hidden,
            "ffn": config.read("intermediate_size", int),
            "heads": heads,
            "kv_heads": config.read("num_key_value_heads", int, heads),
            "head_dim": head_dim,
            "vocab": config.read("vocab_size", int),
            "context": context,
        },
        "norm": {"epsilon": config.read("rms_norm_eps", float, 1e-6)},
        "rope": read_rope(config, context, rotated),
        "attention": {},
        "ffn": ffn,
        "tied_head": config.read("tie_word_embeddings", bool, False),
        "tensors": {},
    }


def name_plain_ffn(up: str, down: str) -> Tables:
    """Names of the matrices and biases of an FFN without gates; ``up`` and ``down``: how the names
    of its two projections begin."""
    return {
        "up": f"{up}.weight",
        "up_bias": f"{up}.bias",
        "down": f"{down}.weight",
        "down_bias": f"{down}.bias",
    }


def omit_positions(layers: Iterable[int]) -> Tables:
    """The ``[other_rope]`` table of layers without positions."""
    chosen = sorted(layers)
    return {"other_rope": {"kind": "none", "layers": chosen}} if chosen else {}


def add_turns(
    config: Config, tables: Tables, full: Config, local: Config, share: float | None = None
) -> None:
    """State rotary positions of layers without a window, by the table ``full``, and of those with
    one, by ``local``; both state the base.  ``share``: see `scale_rope`."""
    context, layers = tables["shape"]["context"], tables["shape"]["layers"]
    tables["rope"], other = (
        scale_rope(config, table, table.read("rope_theta", float), context, share)
        for table in (full, local)
    )
    chosen = tables["attention"].get("window_layers", list(range(layers)))
    if "sliding_window" in tables["attention"] and other != tables["rope"]:
        tables["other_rope"] = {**other, "layers": chosen}


def add_growth(config: Config, tables: Tables) -> None:
    """State queries that grow with the position, where positions are scaled so."""
    scaling = config.read_table("rope_parameters")
    growth = scaling.read("llama_4_scaling_beta", float, 0.0)
    if growth:
        tables["attention"]["growth"] = growth
        original = scaling.read("original_max_position_embeddings", int)
        tables["rope"]["original_context"] = original


def has_cycle(length: int) -> Callable[[int], bool]:
    """Whether a layer has a window where every ``length``-th has none."""
    return lambda layer: length < 1 or (layer + 1) % length != 0
