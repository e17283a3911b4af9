"""Weights and inputs rearranged and rounded for the NPU, as `kernels.products` reads them."""

import numpy as np

from pi2.arrays import F32, U8, Scales
from pi2.backends.hexagon.specification import (
    LANES,
    LAYOUTS,
    LENGTH_STEP,
    FfnShape,
    Weights,
    choose_weights,
    count_together,
)
from pi2.formats import find_packing
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_part, unpack_part
from pi2.plan.weights.layout import GROUP, BundleLayout, Precision, round_up

_TOP = np.float32(127)
_INT8_BIAS = LAYOUTS["int8"].zero
_INT4_PEAK = LAYOUTS["int4"].zero * 127 * GROUP
"""Largest product of a group."""

Arrays = dict[str, U8]
"""Bytes by the names of `rooms`."""


def find_top_multiplier(groups: int) -> int:
    """Return the largest multiplier that keeps the sum of ``groups`` groups within 31 bits."""
    return int(min(2**15 - 1, (2**31 - 1) // (_INT4_PEAK * max(groups, 1))))


def pack_rows(weights: U8, scales: Scales | None, length: int, precision: Precision) -> Arrays:
    """Arrange packed vectors uint8 [n, weight bytes] in tiles: ``weights``, ``multipliers`` and
    ``row_scales``; rows that fill up the last tile are zero."""
    if LAYOUTS[choose_weights(precision)].has_groups:
        assert scales is not None
        return _pack_int4(weights, scales, length)
    return _pack_int8(find_packing(precision).dequantize(weights, scales, length))


def _pack_int4(weights: U8, scales: Scales, length: int) -> Arrays:
    words = find_packing("int4").order_words(weights, length)
    count, groups = words.shape[:2]
    rows, wide = round_up(count, LANES), round_up(length, LENGTH_STEP) // GROUP
    codes = np.zeros((rows, wide, 4), np.uint32)
    codes[:count, :groups] = words
    tiles = codes.reshape(-1, LANES, wide * 4).transpose(0, 2, 1)
    values = scales.astype(np.float32)
    row_scales = np.zeros(rows, np.float32)
    row_scales[:count] = np.abs(values).max(axis=1) / np.float32(find_top_multiplier(wide))
    factors = np.zeros((rows, wide), np.int16)
    safe = np.where(row_scales[:count] > 0, row_scales[:count], np.float32(1))
    factors[:count, :groups] = np.rint(values / safe[:, None]).astype(np.int16)
    pairs = factors.reshape(-1, LANES, wide // 2, 2).transpose(0, 2, 1, 3)
    return {
        "weights": _flatten(tiles),
        "multipliers": _flatten(pairs),
        "row_scales": _flatten(row_scales),
    }


def _pack_int8(values: F32) -> Arrays:
    count, length = values.shape
    rows, wide = round_up(count, LANES), round_up(length, LENGTH_STEP)
    row_scales = np.zeros(rows, np.float32)
    row_scales[:count] = np.abs(values).max(axis=1, initial=0) / _TOP
    codes = np.full((rows, wide), _INT8_BIAS, np.uint8)
    codes[:count, :length] = _round(values, row_scales[:count, None])
    tiles = codes.reshape(-1, LANES, wide // 4, 4).transpose(0, 2, 1, 3)
    return {"weights": _flatten(tiles), "row_scales": _flatten(row_scales)}


def _round(values: F32, scales: F32) -> U8:
    """Codes ``q + 128`` of values, q from -127 to 127."""
    safe = np.where(scales > 0, scales, np.float32(1))
    quotients = np.clip(np.rint(values / safe), -_TOP, _TOP)
    return np.asarray(quotients + np.float32(_INT8_BIAS)).astype(np.uint8)


def pack_neurons(bundles: U8, layout: BundleLayout, shape: FfnShape, room: int) -> Arrays:
    """Arrange bundles uint8 [n, .] that have their scales in them, for a room of ``room`` neurons,
    a multiple of 32 that is not below n."""
    count = len(bundles)
    parts = [slice_part(bundles, layout, index) for index in range(shape.inputs)]
    packed = [pack_rows(*part, layout.hidden, layout.precision) for part in parts]
    tiles = round_up(count, LANES) // LANES
    # The vectors of a tile come one after the other.
    arrays: Arrays = {
        name: np.concatenate([item[name].reshape(tiles, -1) for item in packed], 1).reshape(-1)
        for name in ("weights", "multipliers")
        if name in packed[0]
    }
    planes = np.zeros((shape.inputs, room), np.float32)
    for index, item in enumerate(packed):
        own = item["row_scales"].view(np.float32)
        planes[index, : len(own)] = own
    arrays["row_scales"] = _flatten(planes)
    if shape.options.bias:
        biases = np.zeros((shape.inputs, room), np.float32)
        for index in range(shape.inputs):
            biases[index, :count] = slice_bias(bundles, layout, index)
        arrays["biases"] = _flatten(biases)
    if shape.experts:
        arrays["experts"] = _flatten(slice_experts(bundles, layout))
    return arrays | _pack_down(unpack_part(bundles, layout, shape.inputs), room)


def _pack_down(values: F32, room: int) -> Arrays:
    """Columns of down [n, hidden]: four neurons of 32 elements are a vector."""
    count, hidden = values.shape
    scales = np.abs(values).max(axis=0, initial=0) / _TOP
    codes = np.full((room, hidden), _INT8_BIAS, np.uint8)
    codes[:count] = _round(values, scales[None])
    tiles = codes.reshape(room // 4, 4, hidden // LANES, LANES).transpose(2, 0, 3, 1)
    return {"down": _flatten(tiles), "down_scales": _flatten(np.asarray(scales, np.float32))}


def pack_tokens(values: F32, tokens: int, weights: Weights) -> Arrays:
    """Round inputs [n, length] for a graph of ``tokens`` >= n with weights of a kind: ``inputs``
    int32 [blocks, length / 4, together], ``offsets`` int32 [blocks, groups, together], one group
    where weights are int8, and ``scales`` float32 [tokens]; tokens that fill it up are zeros."""
    count, length = values.shape
    wide, together = round_up(length, LENGTH_STEP), count_together(tokens)
    peaks = np.abs(values).max(axis=1, initial=0)
    inverse = _TOP / np.where(peaks > 0, peaks, np.float32(1))
    codes = np.zeros((tokens, wide), np.int8)
    codes[:count, :length] = np.rint(values * inverse[:, None]).astype(np.int8)
    scales = np.zeros(tokens, np.float32)
    scales[:count] = peaks / _TOP
    own = LAYOUTS[weights]
    sums = codes.reshape(-1, together, own.count_groups(wide), wide // own.count_groups(wide))
    sums = sums.sum(axis=3, dtype=np.int32)
    words = codes.view(np.int32).reshape(-1, together, wide // 4).transpose(0, 2, 1)
    offsets = sums.transpose(0, 2, 1) * np.int32(-own.zero)
    return {"inputs": _flatten(words), "offsets": _flatten(offsets), "scales": _flatten(scales)}


def _flatten(array: np.ndarray) -> U8:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
