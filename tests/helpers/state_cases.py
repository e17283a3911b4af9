"""States of layers, and heads with gates, with random arguments: see `instruction_cases`."""

from collections.abc import Iterator

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.contract import GATES, NORM_PLACES
from tests.helpers.instruction_cases import FILL, HERE, TOKENS, Case, Draw, empty, put


def list_states(draw: Draw) -> Iterator[Case]:
    for gates, places in ((0, 0), (0, 1), (1, 0)):
        yield make_convolution(draw, gates, places)
    for is_delta, of_keys, has_floor in ((1, 0, 0), (1, 1, 0), (1, 1, 1), (0, 0, 0)):
        yield make_preparation(draw, is_delta, of_keys, has_floor)
    for is_delta, of_keys in ((1, 0), (1, 1), (0, 0)):
        yield make_recurrence(draw, is_delta, of_keys)
    yield make_scan(draw)
    yield from list_gated_heads(draw)


def draw_memory(draw: Draw, *shape: int) -> F32:
    """States of two sequences: one begins, and reads nothing that another has left."""
    memory = draw.floats(2, *shape)
    memory[0] = FILL
    return memory


def make_convolution(draw: Draw, has_gates: int, has_places: int) -> Case:
    channels, window, stride = 37, 4, 111
    return Case(
        kernel="convolve", items=-(-channels // 16),
        values={
            **{name: draw.floats(TOKENS, stride) for name in ("x", "before", "after")},
            **put("y", empty(TOKENS, channels)), "x_stride": stride, "has_gates": has_gates,
            "is_silu": 1 - has_gates, "weights": draw.floats(window, channels),
            "bias": draw.floats(channels), "has_bias": has_places,
            "places": draw.order(channels), "has_places": has_places,
            "tails": draw_memory(draw, window - 1, channels), "channels": channels,
            "sequence_stride": (window - 1) * channels, "window": window, "tokens": TOKENS,
            **HERE,
        },
    )  # fmt: skip


def make_preparation(draw: Draw, is_delta: int, of_keys: int, has_floor: int) -> Case:
    heads, key_heads, width = 4, 2, 19
    each, entry_of = width if of_keys else 1, draw.order(heads)
    step_of = (heads + width * np.arange(heads)).astype(np.int32) if is_delta else entry_of
    gates = draw.floats(TOKENS, heads * (width + 1))
    return Case(
        kernel="prepare", items=TOKENS * heads,
        values={
            **{name: draw.floats(TOKENS, key_heads * width) for name in ("queries", "keys")},
            "x_stride": key_heads * width, "key_heads": key_heads, "key_dim": width,
            "heads": heads, "is_delta": is_delta, "of_keys": of_keys, **put("entries", gates),
            **put("steps", gates.copy()), "entry_of": entry_of, "step_of": step_of,
            "bias": draw.floats(heads * width), "rates": -np.abs(draw.floats(heads)),
            "floor": -5.0, "has_floor": has_floor, "shortest": 0.3, "longest": 0.9,
            **put("y", empty(TOKENS, heads * (1 + each))),
        },
    )  # fmt: skip


def make_recurrence(draw: Draw, is_delta: int, of_keys: int) -> Case:
    heads, group, width, depth = 4, 2, 21, 13
    stride, each = heads * width, depth if of_keys else 1
    factors = 1 / (1 + np.exp(-draw.floats(TOKENS, heads * (1 + each))))
    small = np.float32(0.3)
    return Case(
        kernel="recur", items=2 * heads,
        values={
            **{name: draw.floats(TOKENS, stride) * small for name in ("queries", "keys")},
            "values": draw.floats(TOKENS, stride), "x_stride": stride, "heads": heads,
            "group": group, "key_dim": depth, "value_dim": width,
            "value_of": width * draw.order(heads), "is_delta": is_delta, "of_keys": of_keys,
            **put("factors", factors), "skip": draw.floats(heads), "has_skip": 1 - is_delta,
            "memory": draw_memory(draw, heads * depth * width),
            "sequence_stride": heads * depth * width, "tokens": TOKENS,
            **put("y", empty(TOKENS, stride)), **HERE,
        },
    )  # fmt: skip


def make_scan(draw: Draw) -> Case:
    width, depth = 37, 5
    return Case(
        kernel="scan", items=-(-width // 16),
        values={
            **put("x", draw.floats(TOKENS, width)), **put("gates", draw.floats(TOKENS, width)),
            **put("steps", draw.floats(TOKENS, width)),
            **{name: draw.floats(TOKENS, depth, gap=2) for name in ("keys", "queries")},
            "parts_stride": depth + 2, "bias": draw.floats(width),
            "rates": -np.abs(draw.floats(depth, width)), "skip": draw.floats(width),
            "memory": draw_memory(draw, depth * width), "sequence_stride": depth * width,
            "width": width, "key_dim": depth, "tokens": TOKENS,
            **put("y", empty(TOKENS, width)), **HERE,
        },
    )  # fmt: skip


def list_gated_heads(draw: Draw) -> Iterator[Case]:
    heads, width = 3, 19
    for kind, each, place in (
        *(("", 1, "none"), ("sigmoid", 1, "none"), ("softplus", 0, "none")),
        *(("silu", 1, "before"), ("silu", 1, "after")),
    ):
        values = {
            **put("x", draw.floats(TOKENS, 80)),
            **put("gates", draw.floats(TOKENS, 90)),
            "x_of": np.int32(20) + np.int32(20) * np.arange(heads, dtype=np.int32),
            "gate_of": np.int32(1) + np.int32(29) * np.arange(heads, dtype=np.int32),
            "gate_each": each,
            "kind": GATES.index(kind) if kind else -1,
            **put("y", empty(TOKENS, heads * width)),
            "y_of": np.array([38, 0, 19], np.int32),
            "heads": heads,
            "width": width,
            "weights": draw.floats(heads, width),
            "norm_place": NORM_PLACES.index(place),
            "weights_step": width if place == "after" else 0,
            "epsilon": 1e-5,
        }
        yield Case(kernel="gate_heads", items=TOKENS * heads, values=values)
