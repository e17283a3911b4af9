"""Arguments of the kernels: tables of int64, numbers and addresses, by name.

Plain Python: no TVM.  A kernel is called ``(table, first, end, thread)`` and computes items
``first`` to ``end``.  Strides of float32 are elements, those of quantised tokens and of weights
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

_ROWS = (
    "weights grid x x_stride y y_stride blocks tokens bias has_bias added factor"
    " rows scratch scratch_stride expert_of place_of x_of y_of expert_bytes pairs starts experts"
    " routes has_routes planes plane_stride"
)
_ATTENTION = (
    "queries query_stride heads group head_dim key_cache value_cache sequences positions"
    " sequence_stride head_stride window scale cap sinks has_sinks y y_stride scores scores_stride"
    " tokens tile scratch scratch_stride"
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
        # Heads of tokens, and tiles of tokens of the heads that share keys.
        "attend": _ATTENTION,
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
