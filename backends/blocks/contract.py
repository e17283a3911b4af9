"""Arguments of the kernels: tables of int64, numbers and addresses, by name.

Plain Python: no TVM.  A kernel is called ``(table, first, end, thread)`` and computes items
``first`` to ``end``.  Strides of float32 are elements, those of quantised tokens and of weights
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.plan.documents.model import Model

COMMON, STEPS = "common", "steps"
"""Libraries that belong to no format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A library for a processor: the kernels of a format, `COMMON` or `STEPS`."""

    program: ClassVar[str] = "pi2.backends.blocks.program"
    library: str
    architecture: str
    features: tuple[str, ...]
    """Of the processor, sorted; those that choose the instructions."""

    @property
    def isa(self) -> Isa:
        """Instructions that the code has."""
        return choose_isa(frozenset(self.features), self.architecture)

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BlockSpec:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "features": tuple(values["features"])})


_ROPES = ("halves", "neighbours")


def find_unknown(model: Model) -> list[str]:
    """Return what a model has that there are no kernels for, by the keys of its document; empty
    where all of it can be computed."""
    attention, norm, ffn, moe = model.attention, model.norm, model.ffn, model.moe
    ropes = [model.rope, *([] if model.other_rope is None else [model.other_rope])]
    found = {
        "positions": model.positions is not None,
        "layers": any(block.attention is None or len(block.mixers) > 1 for block in model.blocks),
        "moe.router": moe is not None and moe.router not in ("softmax", "sigmoid"),
        "moe.router_input": moe is not None and moe.router_input != "ffn",
        "moe.latent": moe is not None and moe.latent is not None,
        "moe (norm.outputs, ffn.sub_norm)": moe is not None and (norm.outputs or ffn.sub_norm),
        "tensors.experts_turned": moe is not None and model.tensors.experts_turned,
        "tensors.fused_gate_up (moe)": moe is not None and model.tensors.fused_gate_up is not None,
        "side_ffn": model.side_ffn is not None,
        "layer_embedding": model.layer_embedding is not None,
        "altup": model.altup is not None,
        "layer_scale": model.layer_scale,
        "norm.embedding": norm.embedding,
        "rope.pairs": any(own.pairs not in _ROPES for own in ropes),
        "other_heads.keys_are_values": (
            model.other_heads is not None and model.other_heads.keys_are_values
        ),
        "attention.latent": attention.latent is not None,
        "attention.value_width": attention.value_width is not None,
        "attention.value_scale": attention.value_scale != 1.0,
        "attention.value_norm": attention.value_norm,
        "attention.output_gate": attention.output_gate,
        "attention.clip": attention.clip is not None,
        "attention.growth": attention.growth != 0.0,
        "attention.window_kind": attention.window_kind != "sliding",
        "attention.kv_shared_layers": attention.kv_shared_layers > 0,
        "ffn.activation": ffn.activation in ("drelu", "fatrelu"),
        "ffn.absent_layers": bool(ffn.absent_layers),
        "ffn.gate_sparsity": any(ffn.gate_sparsity),
        "ffn.slope": ffn.slope != 1.0 and ffn.limit is None,
        "tensors.fused_order": (
            model.tensors.fused_qkv is not None and model.tensors.fused_order != "stacked"
        ),
        "tensors.gate_up_order": (
            model.tensors.fused_gate_up is not None and model.tensors.gate_up_order != "stacked"
        ),
    }
    return [key for key, is_there in found.items() if is_there]


_ROWS = (
    "weights grid x x_stride y y_stride blocks tokens bias has_bias added factor"
    " rows scratch scratch_stride expert_of place_of x_of y_of expert_bytes pairs starts experts"
    " routes has_routes planes plane_stride"
)
_ATTENTION = (
    "queries query_stride heads group head_dim key_cache value_cache sequences positions"
    " sequence_stride head_stride window scale cap sinks has_sinks y y_stride tokens tile parts"
    " partials scratch scratch_stride"
)

FIELDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(fields.split())
    for name, fields in {
        # Of a format; items are rows, panels of rows, and tokens.
        "multiply": _ROWS,
        "multiply_few": _ROWS,
        "multiply_many": _ROWS,
        "take_rows": "weights grid numbers y y_stride blocks factor",
        # Of all formats; items are tokens.
        "normalize": "x x_stride weights has_weights bias has_bias y y_stride length epsilon"
        " centred added factor",
        # Blocks of tokens.
        "quantize_q8_k": "x x_stride y y_stride length rest has_rest rest_stride order",
        "quantize_q8_0": "x x_stride y y_stride length rest has_rest rest_stride together",
        # Heads of tokens.
        "turn": "x x_stride heads head_dim weights norm_place epsilon positions cos sin"
        " table_stride rotated neighbours",
        # Key heads of tokens.
        "keep": "keys values x_stride heads head_dim key_cache value_cache sequences positions"
        " sequence_stride head_stride",
        # Parts of heads of a token that share keys; heads of tokens; tiles of tokens of heads that
        # share keys.
        "attend": _ATTENTION,
        "join": _ATTENTION,
        "attend_many": _ATTENTION,
        # Tokens; one item; tokens.
        "route": "scores scores_stride experts active chosen weights choice_bias has_choice_bias"
        " expert_scale has_expert_scale is_sigmoid bias_of_score groups active_groups best_two"
        " normalise scaling scratch scratch_stride",
        "group": "chosen active tokens experts starts pairs",
        "weigh": "x x_stride length scores scores_stride",
        # Pieces of `PIECE` elements of tokens.
        "gate": "gates ups has_ups x_stride y y_stride length kind limit slope up_offset",
        "cap": "x x_stride length limit factor",
    }.items()
}
"""Names of each kernel's arguments, in the order of its table."""

PIECE = 1024
"""Elements of an item of kernels that take every element for itself."""
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu")
"""What becomes of gates, by number; ``swiglu`` cuts gates and ups, and has a slope (gpt-oss)."""
NORM_PLACES = ("none", "before", "after")
"""Whether heads have a norm, and when, by number."""
