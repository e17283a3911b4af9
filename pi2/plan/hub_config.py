"""Reading a checkpoint's ``config.json`` for the draft of a model.

Only what LLaMA-like models have in common; everything else is for the author to add, and
`pi2 convert` compares the outcome with the checkpoint's tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError

MAX_BYTES = 1 << 20

_SHAPE = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_attention_heads", "n_head"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions"),
}
_ACTIVATIONS = {"relu": "relu", "silu": "silu", "swish": "silu", "relu2": "relu2"}


def read_config(path: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Shape and options for `pi2.plan.drafting.draft_model`; `UserError` P028 if it is none."""
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        reason = error.strerror or "no such file"
        raise UserError.of("P003", f"cannot be read: {reason}", file=str(path)) from None
    except (ValueError, RecursionError):
        raise UserError.of("P028", "this is no JSON", file=str(path)) from None
    if not isinstance(config, dict):
        raise UserError.of("P028", "expected a JSON object", file=str(path))
    shape: dict[str, int] = {}
    for key, names in _SHAPE.items():
        value = next((config[name] for name in names if _is_count(config.get(name))), None)
        if value is not None:
            shape[key] = value
    if "head_dim" not in shape and "heads" in shape and "hidden" in shape:
        shape["head_dim"] = shape["hidden"] // shape["heads"]
    missing = [names[0] for key, names in _SHAPE.items() if key not in shape]
    if missing:
        message = f"the configuration has no {', '.join(missing)}"
        raise UserError.of("P028", message, file=str(path))
    shape = {key: shape[key] for key in _SHAPE}
    return shape, _read_options(config)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _read_options(config: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    activation = config.get("hidden_act", config.get("hidden_activation"))
    if isinstance(activation, str) and activation in _ACTIVATIONS:
        options["activation"] = _ACTIVATIONS[activation]
    elif activation is not None:
        options["activation"] = "REPLACE_ME"
    for key, name in (("epsilon", "rms_norm_eps"), ("theta", "rope_theta")):
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            options[key] = float(value)
    options["tied_head"] = config.get("tie_word_embeddings") is True
    options["qkv_bias"] = (
        config.get("model_type") == "qwen2" or config.get("attention_bias") is True
    )
    bos, eos = config.get("bos_token_id"), config.get("eos_token_id")
    if type(bos) is int:
        options["bos"] = bos
    if type(eos) is int:
        options["eos"] = [eos]
    elif isinstance(eos, list) and all(type(item) is int for item in eos):
        options["eos"] = eos
    return options
